# SPDX-License-Identifier: Apache-2.0
"""Parameters and bytes of weights: of real files, of transformers' models, of published figures."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from entropykv_vllm.model import fetch_model, model_folder
from entropykv_vllm.plan.model_config import find_model, known_models
from entropykv_vllm.plan.model_shape import read_shape
from entropykv_vllm.plan.weights import BYTES, EXACT, parameters, weight_bytes

SMALL = {
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "hidden_size": 64,
    "intermediate_size": 112,
    "vocab_size": 500,
    "pad_token_id": 0,
    "max_position_embeddings": 2048,
}

#: What a type needs beside these to have all of its parts.
MORE = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "num_experts": 4,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 80,
        "decoder_sparse_step": 2,
    },
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 48, "mlp_only_layers": [1]},
}

#: Published counts: the presets of keras-hub, and the hub's own figures.
PUBLISHED = {
    "Qwen/Qwen2.5-0.5B-Instruct": 494_032_768,
    "Qwen/Qwen2.5-3B-Instruct": 3_085_938_688,
    "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen/Qwen2.5-32B-Instruct": 32_763_876_352,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "google/gemma-3-270m-it": 268_098_176,
    "google/gemma-3-1b-it": 999_885_952,
    "google/gemma-3-4b-it": 3_880_099_328,
    "google/gemma-3-12b-it": 11_765_788_416,
    "meta-llama/Llama-3.1-8B-Instruct": 8_030_261_248,
}


def tensors(path: Path) -> dict:
    """The header of a safetensors file, without reading the tensors."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return header


@pytest.mark.parametrize("name", ["SmolLM2-135M-Instruct", "gemma3-270m"])
def test_the_weights_of_a_real_file_are_counted_to_the_byte(name):
    folder = model_folder(name=name)
    if name == "SmolLM2-135M-Instruct":
        folder = fetch_model(quiet=True)
    elif not folder.is_dir():
        pytest.skip("this model is fetched by name only")
    found = tensors(folder / "model.safetensors").values()
    assert {tensor["dtype"] for tensor in found} == {"F32"}
    ends = [tensor["data_offsets"] for tensor in found]
    shape = read_shape(find_model(str(folder))[1])
    assert weight_bytes(shape, "float32") == sum(end - start for start, end in ends)
    assert weight_bytes(shape, "bfloat16") == 2 * parameters(shape).total


def count(config: dict) -> int:
    """The parameters of transformers' model, made without memory for them."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = config["model_type"]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**config))
    return sum(weight.numel() for weight in model.parameters())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", EXACT)
def test_parameters_are_those_of_transformers_model(kind, tied):
    config = {"model_type": kind, **SMALL, **MORE.get(kind, {}), "tie_word_embeddings": tied}
    if kind in ("granite", "mistral", "mixtral", "phi3", "qwen2", "qwen2_moe"):
        config.pop("head_dim")  # of types whose heads share out the hidden size
    assert parameters(read_shape(config)).total == count(config)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3_text"])
def test_biases_are_counted(kind):
    config = {"model_type": kind, **SMALL, "attention_bias": True}
    if kind == "llama":
        config["mlp_bias"] = True
    config["tie_word_embeddings"] = True
    assert parameters(read_shape(config)).total == count(config)


@pytest.mark.parametrize("name", known_models())
def test_the_shipped_models_have_as_many_parameters_as_transformers_makes(name):
    config = known_models()[name]
    assert parameters(read_shape(config)).total == count(config.get("text_config", config))


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_shipped_models_have_as_many_parameters_as_is_published(name):
    assert parameters(read_shape(known_models()[name])).total == PUBLISHED[name]


def test_quantized_weights_keep_embeddings_in_16_bits():
    """As vLLM logged of Qwen2.5-7B in 4 bits (its issue 13882): 5.2032 GiB."""
    shape = read_shape(known_models()["Qwen/Qwen2.5-7B-Instruct"])
    assert weight_bytes(shape, "int4") / (1 << 30) == pytest.approx(5.2032, rel=0.005)
    sizes = [weight_bytes(shape, stored) for stored in ("int4", "int8", "bfloat16", "float32")]
    assert sizes == sorted(sizes)
    assert weight_bytes(shape, "fp8") == weight_bytes(shape, "int8")
    assert set(BYTES) >= {"bfloat16", "int8", "int4"}
