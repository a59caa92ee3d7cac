# SPDX-License-Identifier: Apache-2.0
"""How many tokens an old page has depends on the heads of the model's cache."""

from types import SimpleNamespace

import pytest
import torch
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from entropykv_vllm.attention.cpu import EvictionCPUAttentionBackend
from entropykv_vllm.attention.gpu import TritonTierBackend
from entropykv_vllm.config.settings import load
from entropykv_vllm.serving import checks
from entropykv_vllm.serving.settings import engine_settings
from entropykv_vllm.serving.worker import _describe


def config(page: int = 32, cache_dtype: str = "auto", **settings) -> SimpleNamespace:
    """The parts of vLLM's configuration that are looked at, for a model of bfloat16."""
    return SimpleNamespace(
        model_config=SimpleNamespace(dtype=torch.bfloat16, get_head_size=lambda: 128),
        cache_config=SimpleNamespace(block_size=page, cache_dtype=cache_dtype),
        **engine_settings(load("entropykv", settings)),
    )


def spec(kind=FullAttentionSpec, head_size: int = 64, dtype=torch.float32, **more):
    return kind(block_size=32, num_kv_heads=1, head_size=head_size, dtype=dtype, **more)


@pytest.mark.parametrize(
    ("head_size", "dtype", "cold"),
    [(64, torch.bfloat16, 112), (64, torch.float32, 224), (32, torch.float16, 96)],
)
def test_old_pages_hold_what_fits_beside_the_new_ones(head_size, dtype, cold):
    (tier,) = checks.tiers_of(config(), range(4), head_size, dtype)
    assert (tier.plan.cold, tier.plan.bits) == (cold, 4)


def test_the_caches_dtype_is_the_models_unless_it_is_set():
    assert checks.model_heads(config()) == (128, torch.bfloat16)
    assert checks.model_heads(config(cache_dtype="float16")) == (128, torch.float16)


def test_heads_are_those_of_the_full_attention_layers():
    window = spec(SlidingWindowSpec, head_size=32, sliding_window=128)
    assert checks.layer_heads(config(), {"a": window, "b": spec()}) == (64, torch.float32)
    assert checks.layer_heads(config(), {"a": window}) == (128, torch.bfloat16)


@pytest.mark.parametrize(
    "other", [{"head_size": 128}, {"dtype": torch.bfloat16}, {"head_size_v": 32}]
)
def test_heads_that_differ_are_not_quantized(other):
    specs = {"a": spec(), "b": spec(**other)}
    with pytest.raises(checks.UnsupportedError, match=r"same head size and dtype.*set bits to 16"):
        checks.layer_heads(config(), specs)
    assert checks.layer_heads(config(bits=16), specs) == (64, torch.float32)


def test_layers_of_vllm_need_a_cache_of_the_models_dtype_on_cpus():
    window = spec(SlidingWindowSpec, dtype=torch.float32, sliding_window=128)
    with pytest.raises(checks.UnsupportedError, match=r"layer a has.*leave --kv-cache-dtype out"):
        checks.check_layers(config(), {"a": window})
    window = spec(SlidingWindowSpec, dtype=torch.bfloat16, sliding_window=128)
    checks.check_layers(config(), {"a": window})


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (EvictionCPUAttentionBackend, CPUAttentionBackend),
        (TritonTierBackend, TritonAttentionBackend),
    ],
)
def test_full_attention_is_served_where_the_layer_asks_for_our_backend(ours, theirs):
    """Models whose values have heads of another size than their keys choose one themselves."""
    layers = {"a": SimpleNamespace(get_attn_backend=lambda: ours)}
    compilation = SimpleNamespace(static_forward_context=layers)
    here = SimpleNamespace(**vars(config()), compilation_config=compilation)
    checks.check_layers(here, {"a": spec()})
    layers["a"].get_attn_backend = lambda: theirs
    with pytest.raises(checks.UnsupportedError, match=f"layer a.*chose {theirs.__name__}"):
        checks.check_layers(here, {"a": spec()})


def test_layers_that_read_the_pages_of_others_have_none_to_plan_for():
    kinds = ["sliding_attention", "full_attention"] * 3
    text = SimpleNamespace(layer_types=kinds, num_hidden_layers=6, num_kv_shared_layers=2)
    model = SimpleNamespace(model_config=SimpleNamespace(hf_text_config=text))
    assert checks.declared_layers(model) == [1, 3]
    del text.num_kv_shared_layers
    assert checks.declared_layers(model) == [1, 3, 5]


def test_the_log_says_what_a_tier_holds():
    (tier,) = checks.tiers_of(config(), range(3), 128, torch.bfloat16)
    assert _describe(tier) == ("all", "0,1,2", "window 224, keep all in 4 bits, 112 tokens a page")
    (tier,) = checks.tiers_of(config(bits=16), range(3), 128, torch.bfloat16)
    assert _describe(tier)[2] == "everything"
