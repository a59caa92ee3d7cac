# SPDX-License-Identifier: Apache-2.0
"""What the values of a `config.json` may be; files by hand, or damaged ones, have others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

#: Beside those that `model_shape` reads one by one and names a flag for.
_COUNTS = (
    "decoder_sparse_step",
    "max_window_layers",
    "moe_intermediate_size",
    "num_experts",
    "num_experts_per_tok",
    "num_local_experts",
    "shared_expert_intermediate_size",
    "sliding_window",
    "sliding_window_pattern",
    "_sliding_window_pattern",
)
_SWITCHES = ("attention_bias", "mlp_bias", "tie_word_embeddings", "use_sliding_window")
_OBJECTS = ("quantization_config", "rope_parameters", "rope_scaling", "text_config")


def is_count(value: object) -> bool:
    """Whether this is a whole number, 0 or more."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_switch(value: object) -> bool:
    return isinstance(value, bool)


def _is_name(value: object) -> bool:
    return isinstance(value, str)


def _is_object(value: object) -> bool:
    return isinstance(value, Mapping)


def _are_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _are_counts(value: object) -> bool:
    return isinstance(value, list) and all(map(is_count, value))


def _is_factor(value: object) -> bool:
    return isinstance(value, int | float) and 0 < value < float("inf")


#: By key: what a value must pass, and in words.
_RULES: dict[str, tuple[Callable[[object], bool], str]] = {
    **dict.fromkeys(_COUNTS, (is_count, "a whole number, 0 or more")),
    **dict.fromkeys(_SWITCHES, (_is_switch, "true or false")),
    **dict.fromkeys(_OBJECTS, (_is_object, "an object in braces")),
    "model_type": (_is_name, "a name"),
    "layer_types": (_are_names, "a list of names"),
    "mlp_only_layers": (_are_counts, "a list of layers"),
}


def check_values(config: Mapping[str, Any]) -> None:
    """Refuse values of a kind that makes no sense; null is as good as left out.

    Raises:
        ValueError: one sentence that names the key.
    """
    for key, (fits, words) in _RULES.items():
        _check(key, config.get(key), fits, words)
    for key in ("rope_scaling", "rope_parameters"):
        _check(
            f"{key}.factor", (config.get(key) or {}).get("factor"), _is_factor, "a number above 0"
        )
    _check_quantization(config.get("quantization_config") or {})


def _check_quantization(quantization: Mapping[str, Any]) -> None:
    groups, where = quantization.get("config_groups"), "quantization_config.config_groups"
    _check(where, groups, _is_object, "an object in braces")
    for name, group in (groups or {}).items():
        _check(f"{where}.{name}", group, _is_object, "an object in braces")
        weights = (group or {}).get("weights")
        _check(f"{where}.{name}.weights", weights, _is_object, "an object in braces")


def _check(key: str, value: object, fits: Callable[[object], bool], words: str) -> None:
    if value is not None and not fits(value):
        raise ValueError(f"the model's {key} is {str(value)[:40]!r}: it must be {words}")
