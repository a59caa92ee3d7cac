# SPDX-License-Identifier: Apache-2.0
"""How many parameters a model of a shape has, and the bytes of its weights."""

from __future__ import annotations

from dataclasses import dataclass

from entropykv_vllm.plan.model_shape import ModelShape

#: Bytes of a parameter, by how the weights are stored. Four bits have a 16-bit scale and a zero
#: for each 128 of them.
BYTES = {
    "bfloat16": 2.0,
    "float16": 2.0,
    "float32": 4.0,
    "fp8": 1.0,
    "int8": 1.0,
    "int4": 0.5 + 2.5 / 128,
}

#: Embeddings, norms and biases stay in 16 bits where the matrices are quantized.
KEPT_BYTES = 2.0

#: Types with a bias on queries, keys and values whatever the file says.
_QKV_BIAS = ("qwen2", "qwen2_moe")

#: Types that normalize each head of the queries and keys, all of them alike.
_HEAD_NORM = ("gemma3_text", "qwen3", "qwen3_moe")

#: Types that normalize queries and keys whole.
_WHOLE_NORM = ("olmo2", "olmo3")

#: Norms of a layer, if not two.
_NORMS = {"cohere": 1, "cohere2": 1, "gemma2": 4, "gemma3_text": 4}

#: Types whose parameters are counted exactly; any other is taken for a Llama.
EXACT = (
    "gemma",
    "gemma2",
    "gemma3_text",
    "granite",
    "llama",
    "ministral",
    "mistral",
    "mixtral",
    "olmo2",
    "olmo3",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "smollm3",
)


@dataclass(frozen=True)
class Parameters:
    """How many parameters are in matrices, which may be quantized, and how many elsewhere."""

    matrices: int
    rest: int

    @property
    def total(self) -> int:
        return self.matrices + self.rest


def parameters(shape: ModelShape) -> Parameters:
    """Count the parameters of a model's text part."""
    width = shape.heads * shape.head_size
    kv_width = shape.kv_heads * shape.head_size
    attention = shape.hidden * (2 * width + 2 * kv_width)
    mlps, routers = _mlps(shape)
    embeddings = shape.vocabulary * shape.hidden * (1 if shape.tied else 2)
    layer = _norms(shape, width, kv_width) + _biases(shape, width, kv_width)
    return Parameters(
        matrices=shape.layers * attention + mlps,
        rest=embeddings + shape.layers * layer + routers + shape.hidden,
    )


def active_parameters(shape: ModelShape) -> int:
    """Parameters that a token goes through: of a mixture, those of its experts alone."""
    experts, total = shape.experts, parameters(shape).total
    if experts is None:
        return total
    idle = experts.layers * (experts.count - experts.chosen)
    return total - idle * 3 * shape.hidden * experts.mlp


def weight_bytes(shape: ModelShape, stored: str) -> int:
    """Bytes of the weights, stored as a key of `BYTES`."""
    count = parameters(shape)
    each = BYTES[stored]
    return round(count.matrices * each + count.rest * max(KEPT_BYTES, each))


def _mlps(shape: ModelShape) -> tuple[int, int]:
    """Parameters of the MLPs of all layers, experts included, and of what chooses the experts."""
    experts = shape.experts
    dense = shape.layers - (experts.layers if experts else 0)
    matrices = dense * 3 * shape.hidden * shape.mlp
    if experts is None:
        return matrices, 0
    each = 3 * shape.hidden * (experts.count * experts.mlp + experts.shared)
    routers = shape.hidden * (experts.count + (1 if experts.shared else 0))
    return matrices + experts.layers * each, experts.layers * routers


def _norms(shape: ModelShape, width: int, kv_width: int) -> int:
    heads = 2 * shape.head_size if shape.kind in _HEAD_NORM else 0
    whole = width + kv_width if shape.kind in _WHOLE_NORM else 0
    return _NORMS.get(shape.kind, 2) * shape.hidden + heads + whole


def _biases(shape: ModelShape, width: int, kv_width: int) -> int:
    qkv = width + 2 * kv_width if shape.attention_bias or shape.kind in _QKV_BIAS else 0
    output = shape.hidden if shape.attention_bias and shape.kind not in _QKV_BIAS else 0
    return qkv + output + (2 * shape.mlp + shape.hidden if shape.mlp_bias else 0)
