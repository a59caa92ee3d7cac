# SPDX-License-Identifier: Apache-2.0
"""A model's shape from its config.json: defaults, windows, what is missing and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from entropykv_vllm.plan.layer_windows import PERIODS
from entropykv_vllm.plan.model_config import known_models
from entropykv_vllm.plan.model_shape import DEFAULTS, Experts, read_shape
from entropykv_vllm.plan.pool import full_pool
from entropykv_vllm.plan.weights import EXACT, parameters

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
}

#: Keys of other models' files that are read.
MORE_KEYS = (
    "attention_bias",
    "layer_types",
    "mlp_only_layers",
    "moe_intermediate_size",
    "num_experts",
    "quantization_config",
    "rope_scaling",
    "sliding_window",
    "text_config",
    "use_sliding_window",
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 70) | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["factor", "type", "bits", "config_groups", "weights", "num_bits"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=5,
)


def of_transformers(kind: str, **config):
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[kind](**config)


@pytest.mark.parametrize("kind", DEFAULTS)
def test_what_a_file_leaves_out_is_what_transformers_takes(kind):
    theirs = of_transformers(kind)
    assert {key: getattr(theirs, key) for key in DEFAULTS[kind]} == DEFAULTS[kind]


@pytest.mark.parametrize("kind", EXACT)
def test_a_file_that_does_not_say_ties_the_vocabulary_as_transformers_does(kind):
    assert (
        read_shape({**LLAMA, "model_type": kind}).tied == of_transformers(kind).tie_word_embeddings
    )


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        *((kind, {}) for kind in PERIODS),
        ("gemma3_text", {"sliding_window_pattern": 3}),
        ("mistral", {}),
        ("mistral", {"sliding_window": None}),
        ("ministral", {}),
        ("qwen2", {"sliding_window": 99, "max_window_layers": 1}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 99, "max_window_layers": 1}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 99, "max_window_layers": 1}),
        ("smollm3", {"sliding_window": 99}),
        ("gemma2", {"layer_types": ["full_attention", *["sliding_attention"] * 12]}),
    ],
)
def test_windows_are_those_of_transformers(kind, more):
    config = {**LLAMA, "model_type": kind, "num_hidden_layers": 13, **more}
    theirs = of_transformers(**{"kind": kind, **config})
    window = theirs.sliding_window
    everywhere = "full_attention" if window is None else "sliding_attention"
    kinds = getattr(theirs, "layer_types", None) or [everywhere] * 13
    expected = tuple(window if each == "sliding_attention" else None for each in kinds)
    assert read_shape(config).windows == expected


def test_heads_share_out_the_hidden_size_and_have_keys_of_their_own_unless_said():
    shape = read_shape({k: v for k, v in LLAMA.items() if k != "num_key_value_heads"})
    assert (shape.kv_heads, shape.head_size, shape.full_layers) == (8, 64, (0, 1, 2, 3))
    assert read_shape({**LLAMA, "head_dim": 96}).head_size == 96
    assert read_shape(LLAMA).token_bytes(2) == 2 * 2 * 64 * 2


def test_the_text_part_of_a_model_that_sees_is_read():
    shape = read_shape({"model_type": "gemma3", "vision_config": {}, "text_config": LLAMA})
    assert (shape.vision, shape.hidden) == (True, 512)


def test_what_is_given_goes_before_the_file():
    shape = read_shape(LLAMA, {"num_hidden_layers": 7, "max_position_embeddings": 9})
    assert (shape.layers, shape.positions) == (7, 9)


@pytest.mark.parametrize(
    ("rope", "longest"),
    [
        ({"rope_type": "yarn", "factor": 4.0}, 4096),  # vLLM takes such files as stretched already
        ({"type": "linear", "factor": 4.0}, 16384),
        ({"rope_type": "dynamic", "factor": 2.0}, 8192),
        ({"rope_type": "linear", "factor": None}, 4096),
        (None, 4096),
    ],
)
def test_positions_are_stretched_as_vllm_stretches_them(rope, longest):
    assert read_shape({**LLAMA, "rope_scaling": rope}).positions == longest
    assert (
        read_shape({**LLAMA, "model_type": "gemma3_text", "rope_scaling": rope}).positions == 4096
    )


def test_experts_take_the_place_of_the_mlp_where_they_are():
    moe = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
    shape = read_shape({**LLAMA, **moe, "decoder_sparse_step": 2, "mlp_only_layers": [3]})
    assert shape.experts == Experts(layers=1, count=8, chosen=2, mlp=96, shared=0)
    assert read_shape({**LLAMA, "num_local_experts": 8}).experts.mlp == 1024


@pytest.mark.parametrize(
    ("quantization", "stored"),
    [
        (None, None),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "int4"),
        ({"quant_method": "gptq", "bits": 8}, "int8"),
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "int4"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "int8"),
        ({"quant_method": "fbgemm_fp8"}, "fp8"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float"}}},
            },
            "fp8",
        ),
        # Of these the bytes are not known, so the method is named.
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"quant_method": "gptq", "bits": 3}, "gptq"),
        ({"bits": 3}, "not named"),
        (
            {
                "quant_method": "modelopt",
                "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "float"}}},
            },
            "modelopt",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "group_0": {"weights": {"num_bits": 4}},
                    "group_1": {"weights": {"num_bits": 8}},
                },
            },
            "compressed-tensors",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 4}}},
            },
            "int4",
        ),
    ],
)
def test_how_weights_are_stored_is_read(quantization, stored):
    assert read_shape({**LLAMA, "quantization_config": quantization}).stored == stored


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers is not known: give it with --layers"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0: give a number above 0"),
        ({"hidden_size": "big"}, "hidden_size is 'big': give a number above 0 with --hidden-size"),
        ({"num_key_value_heads": 3}, "8 query heads cannot share 3 KV heads"),
        ({"kv_lora_rank": 512}, r"multi-head latent attention \(kv_lora_rank\)"),
        ({"is_encoder_decoder": True}, "the model has an encoder"),
        ({"full_attention_interval": 4}, "the model has layers without attention"),
        ({"layer_types": ["linear_attention"] * 4}, "layers of the kind 'linear_attention'"),
        ({"layer_types": ["full_attention"]}, "names the kinds of 1 layers and has 4"),
        ({"num_hidden_layers": 10**9}, "no model has 1,000,000,000 layers"),
        ({"max_position_embeddings": -5}, "max_position_embeddings is -5: give a number above 0"),
        ({"max_position_embeddings": "8k"}, "is '8k': give a number above 0 with --positions"),
        ({"num_experts": -8}, "num_experts is '-8': it must be a whole number, 0 or more"),
        ({"num_experts": 8, "moe_intermediate_size": "9"}, "moe_intermediate_size is '9'"),
        ({"num_experts": 8, "mlp_only_layers": 3}, "mlp_only_layers is '3': it must be a list"),
        ({"tie_word_embeddings": "false"}, "is 'false': it must be true or false"),
        ({"model_type": ["llama"]}, "the model's model_type is "),
        ({"layer_types": 5}, "layer_types is '5': it must be a list of names"),
        ({"sliding_window": -7}, "sliding_window is '-7'"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear': it must be an object"),
        ({"rope_scaling": {"type": "linear", "factor": "4"}}, "rope_scaling.factor is '4'"),
        ({"quantization_config": "awq"}, "quantization_config is 'awq'"),
        ({"quantization_config": {"config_groups": ["a"]}}, "config_groups is "),
        ({"quantization_config": {"config_groups": {"a": "b"}}}, "config_groups.a is 'b'"),
        ({"text_config": [1]}, "text_config is "),
        ({"n_routed_experts": 64}, "the experts of this model are not counted"),
    ],
)
def test_what_cannot_be_counted_is_refused_in_one_sentence(more, sentence):
    with pytest.raises(ValueError, match=sentence) as caught:
        read_shape({**LLAMA, **more})
    assert "\n" not in str(caught.value)


def test_null_is_as_good_as_left_out():
    nothing = dict.fromkeys(("layer_types", "rope_scaling", "text_config", "model_type"))
    assert read_shape({**LLAMA, **nothing}) == read_shape(LLAMA)


@given(st.sampled_from(sorted({*LLAMA, *MORE_KEYS})), JSON)
def test_no_value_of_a_key_ends_in_a_traceback(key, value):
    try:
        shape = read_shape({**LLAMA, key: value})
    except ValueError:
        return
    assert parameters(shape).total > 0
    assert full_pool(shape, 2048).peak(100) > 0


@pytest.mark.parametrize("name", known_models())
def test_every_shipped_model_can_be_read(name):
    shape = read_shape(known_models()[name])
    assert shape.full_layers
    assert shape.positions >= 2048
    assert shape.vision == ("gemma-3-4b" in name or "gemma-3-12b" in name)
