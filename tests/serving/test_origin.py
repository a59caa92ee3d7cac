# SPDX-License-Identifier: Apache-2.0
"""A worker that evicts in another way than its scheduler stops the server, and is named."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec

from entropykv_vllm.config.settings import CONFIG_KEY, load
from entropykv_vllm.pages.spec import tier_spec
from entropykv_vllm.plan.schedule import TierPlan
from entropykv_vllm.serving.checks import UnsupportedError, check_groups
from entropykv_vllm.serving.origin import origin_of

SETTINGS = load("entropykv", None)
OURS = origin_of(SETTINGS)
PLAN = TierPlan("all", 32, 32, 128, 128, 64, 0.5, 0, bits=16)
FULL = FullAttentionSpec(block_size=32, num_kv_heads=1, head_size=64, dtype=torch.float16)


def check(*specs) -> None:
    settings = SETTINGS.model_dump(mode="json", exclude_none=True)
    config = SimpleNamespace(additional_config={CONFIG_KEY: settings})
    groups = [SimpleNamespace(kv_cache_spec=spec) for spec in specs]
    check_groups(config, SimpleNamespace(kv_cache_groups=groups))


def tier(**other):
    return tier_spec(FULL, PLAN, replace(OURS, **other))


def test_workers_alike_are_served_wherever_they_run():
    check(tier(), tier(node="elsewhere"))
    assert tier() == tier(node="elsewhere"), "vLLM would refuse layers that two machines share"


def test_another_version_is_named_with_its_node():
    with pytest.raises(UnsupportedError, match=r"worker on far away runs EntropyKV 9\.9"):
        check(tier(), tier(version="9.9", node="far away"))


def test_other_settings_are_named_with_their_node():
    other = origin_of(load("entropykv", {"keep": 0.123})).settings
    with pytest.raises(UnsupportedError, match="worker on far away evicts with other settings"):
        check(tier(), tier(settings=other, node="far away"))


def test_a_worker_without_eviction_is_refused():
    with pytest.raises(UnsupportedError, match="a worker does not run EntropyKV"):
        check(tier(), FULL)
