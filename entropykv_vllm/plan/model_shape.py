# SPDX-License-Identifier: Apache-2.0
"""What of a model decides its memory, read from its `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from entropykv_vllm.config.settings import MOST_LAYERS
from entropykv_vllm.plan.config_values import check_values
from entropykv_vllm.plan.layer_windows import layer_windows
from entropykv_vllm.plan.quantization import stored

#: Keys that mark what is not counted here, and the name of it.
_REFUSED = {
    "kv_lora_rank": "multi-head latent attention",
    "is_encoder_decoder": "an encoder",
    "global_head_dim": "heads of two sizes",
    "num_kv_shared_layers": "layers that share their keys and values",
    "attention_chunk_size": "attention in chunks",
    "attn_layer_period": "layers without attention",
    "full_attention_interval": "layers without attention",
    "hybrid_override_pattern": "layers without attention",
    "mamba_d_state": "layers without attention",
}

#: What the files of a model type may leave out, since it is the type's own default.
DEFAULTS: dict[str, dict[str, Any]] = {
    "cohere2": {"tie_word_embeddings": True, "sliding_window": 4096},
    "gemma": {"tie_word_embeddings": True, "head_dim": 256},
    "gemma2": {"tie_word_embeddings": True, "head_dim": 256, "sliding_window": 4096},
    "gemma3_text": {
        "tie_word_embeddings": True,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
        "sliding_window": 4096,
    },
    "ministral": {"sliding_window": 4096},
    "mistral": {"sliding_window": 4096},
    "olmo3": {"sliding_window": 4096},
    "qwen2": {"use_sliding_window": False},
    "qwen3": {"use_sliding_window": False, "head_dim": 128},
    "qwen2_moe": {"use_sliding_window": False},
    "qwen3_moe": {"use_sliding_window": False},
    "smollm3": {"tie_word_embeddings": True, "use_sliding_window": False},
}

#: Kinds of rotary scaling whose factor vLLM multiplies the longest length with.
_STRETCHED = ("linear", "dynamic", "ntk")


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of the MLP.

    Attributes:
        layers: how many layers have one.
        count: experts of such a layer.
        chosen: experts that a token goes through.
        mlp: the width of an expert.
        shared: the width of the one that all tokens go through, 0 if there is none.
    """

    layers: int
    count: int
    chosen: int
    mlp: int
    shared: int


@dataclass(frozen=True)
class ModelShape:
    """The numbers of a model; sizes are in elements, windows and positions in tokens.

    Attributes:
        kind: the `model_type`.
        windows: of each layer, None where attention is full.
        positions: the longest length that the model reads, None if the file does not say.
        stored: how the file says that the weights are quantized: a key of `weights.BYTES`, or the
            name of a method whose bytes are not known; None if they are not.
    """

    kind: str
    heads: int
    kv_heads: int
    head_size: int
    hidden: int
    mlp: int
    vocabulary: int
    windows: tuple[int | None, ...]
    positions: int | None
    tied: bool
    attention_bias: bool
    mlp_bias: bool
    experts: Experts | None
    stored: str | None
    vision: bool

    @property
    def layers(self) -> int:
        return len(self.windows)

    @property
    def full_layers(self) -> tuple[int, ...]:
        """The layers with full attention, which alone are evicted from."""
        return tuple(i for i, window in enumerate(self.windows) if window is None)

    def token_bytes(self, item_bytes: int) -> int:
        """Bytes of one token's keys and values in one layer."""
        return 2 * self.kv_heads * self.head_size * item_bytes


def read_shape(config: Mapping[str, Any], given: Mapping[str, Any] | None = None) -> ModelShape:
    """Read the shape of a model.

    Args:
        config: its `config.json`, already parsed.
        given: numbers that go before those of the file.

    Raises:
        ValueError: if a number is missing or none, or the model is of a kind that is not counted.
    """
    check_values(config)
    text = {**_text(config), **(given or {})}
    check_values(text)
    _refuse(text)
    layers = layer_count(_number(text, "num_hidden_layers", "layers"))
    quantization = text.get("quantization_config") or config.get("quantization_config")
    hidden = _number(text, "hidden_size", "hidden-size")
    heads, kv_heads, head_size = _heads(text, hidden)
    return ModelShape(
        kind=text.get("model_type") or "llama",
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        hidden=hidden,
        mlp=_number(text, "intermediate_size", "intermediate-size"),
        vocabulary=_number(text, "vocab_size", "vocab-size"),
        windows=layer_windows(text, layers),
        positions=_positions(text),
        tied=bool(text.get("tie_word_embeddings", False)),
        attention_bias=bool(text.get("attention_bias", False)),
        mlp_bias=bool(text.get("mlp_bias", False)),
        experts=_experts(text, layers),
        stored=stored(quantization) if quantization else None,
        vision="vision_config" in config,
    )


def _text(config: Mapping[str, Any]) -> dict[str, Any]:
    """The part that describes the language model, with the defaults of its type."""
    nested = config.get("text_config")
    text = dict(nested) if isinstance(nested, Mapping) else dict(config)
    return {**DEFAULTS.get(str(text.get("model_type")), {}), **text}


def _refuse(text: Mapping[str, Any]) -> None:
    for key, what in _REFUSED.items():
        if text.get(key):
            raise ValueError(
                f"the model has {what} ({key}), which is not counted: choose another model"
            )


def _number(text: Mapping[str, Any], key: str, flag: str) -> int:
    value = text.get(key)
    if value is None:
        raise ValueError(f"the model's {key} is not known: give it with --{flag}")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"the model's {key} is {value!r}: give a number above 0 with --{flag}")
    return value


def layer_count(layers: int) -> int:
    """The number of layers, if a model can have as many.

    Raises:
        ValueError: if none can.
    """
    if not 0 < layers <= MOST_LAYERS:
        raise ValueError(f"no model has {layers:,} layers: give their number with --layers")
    return layers


def _heads(text: Mapping[str, Any], hidden: int) -> tuple[int, int, int]:
    """Query heads, KV heads and channels of a head."""
    heads = _number(text, "num_attention_heads", "heads")
    spoken = text.get("num_key_value_heads", heads)  # left out, each head has keys of its own
    kv_heads = _number({"num_key_value_heads": spoken}, "num_key_value_heads", "kv-heads")
    head_size = _number(
        {"head_dim": text.get("head_dim") or hidden // heads}, "head_dim", "head-size"
    )
    if heads % kv_heads:
        raise ValueError(
            f"{heads} query heads cannot share {kv_heads} KV heads: give --heads and --kv-heads "
            "of which one divides the other"
        )
    return heads, kv_heads, head_size


def _positions(text: Mapping[str, Any]) -> int | None:
    if text.get("max_position_embeddings") is None:
        return None
    longest = _number(text, "max_position_embeddings", "positions")
    rope = text.get("rope_scaling") or text.get("rope_parameters") or {}
    kind = rope.get("rope_type", rope.get("type"))
    stretched = kind in _STRETCHED and not str(text.get("model_type")).startswith("gemma3")
    return int(longest * (rope.get("factor") or 1)) if stretched else longest


def _experts(text: Mapping[str, Any], layers: int) -> Experts | None:
    count = text.get("num_local_experts") or text.get("num_experts")
    if not count:
        if "n_routed_experts" in text:
            raise ValueError(
                "the experts of this model are not counted: choose another, or give its weights "
                "as those of a model without experts"
            )
        return None
    every = text.get("decoder_sparse_step") or 1
    dense = set(text.get("mlp_only_layers") or ())
    return Experts(
        layers=sum(i not in dense and (i + 1) % every == 0 for i in range(layers)),
        count=count,
        chosen=text.get("num_experts_per_tok") or 1,
        mlp=text.get("moe_intermediate_size") or _number(text, "intermediate_size", ""),
        shared=text.get("shared_expert_intermediate_size") or 0,
    )
