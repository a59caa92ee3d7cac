# SPDX-License-Identifier: Apache-2.0
"""The planner's pages against vLLM's: what its pool held, its manager holds, and it counts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from entropykv_vllm.config.presets import PRESETS
from entropykv_vllm.config.settings import load
from entropykv_vllm.plan.model_config import known_models
from entropykv_vllm.plan.model_shape import ModelShape, read_shape
from entropykv_vllm.plan.pool import (
    FULL_PAGE,
    STEPS_IN_FLIGHT,
    Pool,
    eviction_pool,
    full_pool,
    group_layers,
    shape_tiers,
)
from entropykv_vllm.serving.settings import page_size

from ..pages.model import Engine

STEP = 2048
MEASURED = sorted((Path(__file__).parents[2] / "docs/data").glob("memory-*/*-*.json"))

SMALL = read_shape(
    {
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "hidden_size": 256,
        "intermediate_size": 256,
        "vocab_size": 512,
        "max_position_embeddings": 8192,
    }
)


def pool_of(shape: ModelShape, policy: str, settings: str | dict) -> Pool:
    config = load(policy, settings)
    return eviction_pool(shape, config, page_size(config), 2, STEP)


@pytest.mark.parametrize("path", MEASURED, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_the_pages_are_those_that_vllms_pool_had_in_use(path):
    """`entropykv memory` read them from a running engine after each step."""
    measured = json.loads(path.read_text())
    spec = measured["spec"]
    pool = pool_of(read_shape(spec["config"]), spec["policy"], spec["eviction"])
    length = spec["tokens"] + spec["decode"]
    assert pool.page_bytes == measured["page bytes"]
    assert pool.peak(length) == measured["peak"]["pages"]
    assert pool.mean_held(length, spec["decode"]) == measured["decode"]["pages"]


def test_something_was_measured():
    assert len(MEASURED) > 20


# -- a request in vLLM's own KV cache manager --------------------------------------------------

SETTINGS = {name: (policy, name) for name, policy in PRESETS.items()} | {
    "several tiers": ("entropykv", {"preset": "long-context", "lara_keep": 0.5}),
    "tiers by hand": (
        "entropykv",
        {
            "preset": "extreme",
            "tiers": [
                {"name": "two", "layers": "0-1", "keep": 1.0},
                {"name": "four", "layers": "2-5"},
            ],
        },
    ),
}


def engine_of(pool: Pool, pages: int, caching: bool) -> Engine:
    return Engine([table.plan for table in pool.tables], pages, caching)


def held(engine: Engine, request: str) -> list[int]:
    """Pages of each block table of a request; all of them together are what the pool misses."""
    pages = [sum(not b.is_null for b in tier.req_to_blocks[request]) for tier in engine.tiers]
    assert sum(pages) == engine.pool.num_gpu_blocks - 1 - engine.pool.get_num_free_blocks()
    return pages


@pytest.mark.parametrize(
    ("tokens", "answer", "caching"), [(300, 40, True), (2500, 300, False), (4000, 64, True)]
)
@pytest.mark.parametrize("name", SETTINGS)
def test_a_request_holds_what_is_planned_and_peaks_where_it_is_planned(
    name, tokens, answer, caching
):
    pool = pool_of(SMALL, *SETTINGS[name])
    engine = engine_of(pool, 6000, caching)
    prompt = [(i * 31) % 50_000 for i in range(tokens - answer)]
    request = engine.add("r", prompt)
    steps, answering = [], []
    while request.num_computed_tokens < tokens:
        engine.step(budget=10_000)
        steps.append(held(engine, "r"))
        if request.num_computed_tokens > len(prompt):
            answering.append(sum(steps[-1]))
    # Tables may peak at different steps; vLLM counts the peak of each.
    peaks = [max(pages) for pages in zip(*steps, strict=True)]
    assert peaks == [table.peak(tokens) for table in pool.tables]
    assert sum(peaks) == pool.peak(tokens)
    assert len(answering) == answer
    assert sum(answering) / answer == pool.mean_held(tokens, answer)


@pytest.mark.parametrize("tokens", [700, 3000])
@pytest.mark.parametrize("name", SETTINGS)
def test_as_many_requests_are_read_together_as_are_planned_and_not_one_more(name, tokens):
    """One more waits until another is through its prompt; without it, none is preempted."""
    pool = pool_of(SMALL, *SETTINGS[name])
    room = pool.page_bytes * (4 * pool.peak(tokens) + 1)  # four, and vLLM's null page
    room += pool.page_bytes * (pool.peak(tokens) - 1)  # and almost a fifth
    planned = pool.requests(room, tokens)
    assert planned == 4
    for count in (planned, planned + 1):
        engine = engine_of(pool, room // pool.page_bytes, caching=False)
        requests = [engine.add(f"r{i}", [i] * tokens) for i in range(count)]
        together = 0
        while not engine.preemptions and any(r.num_computed_tokens < tokens for r in requests):
            together = max(together, sum(r.num_computed_tokens < tokens for r in engine.running))
            engine.step(budget=1 << 20)
        assert together in (0, planned), "a short prompt is read in one step"
        assert count > planned or not engine.preemptions


# -- what vLLM counts when it starts -----------------------------------------------------------


def vllm_config(max_model_len: int, fit: bool) -> SimpleNamespace:
    """What `get_kv_cache_configs` reads of a configuration; `fit` as --max-model-len auto."""
    from vllm.v1.kv_cache_layout import KVCacheLayout

    return SimpleNamespace(
        model_config=SimpleNamespace(
            max_model_len=max_model_len, original_max_model_len=-1 if fit else max_model_len
        ),
        cache_config=SimpleNamespace(
            num_gpu_blocks_override=None,
            prefix_cache_retention_interval=None,
            get_resolved_kv_cache_layout=lambda: KVCacheLayout.LBHNC,
        ),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1, tensor_parallel_size=1, pipeline_parallel_size=1
        ),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        attention_config=SimpleNamespace(hisparse_config=None),
        device_config=SimpleNamespace(device_type="cuda"),
        speculative_config=None,
        num_prefill_lookahead_tokens=0,
        max_in_flight_tokens=STEPS_IN_FLIGHT * STEP,
    )


def vllm_specs(shape: ModelShape, settings: tuple[str, str | dict] | None) -> dict:
    """vLLM's spec of each layer, with ours in place of full attention if there are settings."""
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    from entropykv_vllm.pages.spec import Origin, tier_spec

    config = load(*settings) if settings else None
    page = page_size(config) if config else FULL_PAGE
    tiers = shape_tiers(shape, config, page, 2) if config else ()
    plan_of = {layer: tier.plan for tier in tiers for layer in tier.layers}
    common = {
        "block_size": page,
        "num_kv_heads": shape.kv_heads,
        "head_size": shape.head_size,
        "dtype": torch.bfloat16,
    }
    specs = {}
    for layer, window in enumerate(shape.windows):
        spec = FullAttentionSpec(**common)
        if window is not None:
            spec = SlidingWindowSpec(sliding_window=window, **common)
        elif config:
            spec = tier_spec(spec, plan_of[layer], Origin("0", "", "here"))
        specs[f"layers.{layer}"] = spec
    return specs


def shape_of(model: str) -> ModelShape:
    (config,) = (c for name, c in known_models().items() if name.endswith(f"/{model}"))
    return read_shape(config)


SHAPES = {
    **{
        name: shape_of(name)
        for name in ("Qwen2.5-7B-Instruct", "gemma-3-270m-it", "gemma-3-1b-it", "gemma-3-4b-it")
    },
    "six full layers among sixteen": replace(SMALL, windows=(None,) * 6 + (512,) * 10),
}
CASES = [
    (model, name)
    for model, shape in SHAPES.items()
    for name in ("vLLM alone", *SETTINGS)
    if name != "tiers by hand" or len(shape.full_layers) == 6
]


@pytest.mark.parametrize(("model", "name"), CASES)
def test_vllm_counts_the_same_groups_pages_lengths_and_requests(model, name):
    from vllm.v1.core import kv_cache_utils

    shape, settings = SHAPES[model], SETTINGS.get(name)
    pool = pool_of(shape, *settings) if settings else full_pool(shape, STEP)
    room = 40 * pool.page_bytes + pool.page_bytes * pool.peak(shape.positions // 3)
    config = vllm_config(shape.positions, fit=True)
    specs = vllm_specs(shape, settings)
    (found,) = kv_cache_utils.get_kv_cache_configs(config, [specs], [room])
    concurrency = kv_cache_utils.get_max_concurrency_for_kv_cache_config(config, found)
    longest = config.model_config.max_model_len
    assert len(found.kv_cache_groups) == len(pool.tables)
    assert found.num_blocks == pool.usable(room) + 1
    assert longest == pool.longest(room, shape.positions)
    assert found.num_blocks / concurrency == pytest.approx(pool.peak(longest), abs=1e-6)
    _assert_refused(specs, room, longest + 1 if longest < shape.positions else None)


def _assert_refused(specs: dict, room: int, length: int | None) -> None:
    from vllm.v1.core import kv_cache_utils

    if length is None:
        return
    with pytest.raises(ValueError, match="max seq len"):
        kv_cache_utils.get_kv_cache_configs(vllm_config(length, fit=False), [specs], [room])


def test_groups_are_of_the_rarest_kind_unless_all_are_about_as_many():
    assert group_layers([28]) == 28
    assert group_layers([5, 29]) == 5
    assert group_layers([12, 13]) == 13
    assert group_layers([10, 15]) == 10


def test_a_pool_smaller_than_a_page_holds_nothing():
    pool = pool_of(SMALL, "entropykv", "balanced")
    for room in (-(10**9), 0, pool.page_bytes):
        assert pool.usable(room) == pool.longest(room, 8192) == pool.requests(room, 8192) == 0
