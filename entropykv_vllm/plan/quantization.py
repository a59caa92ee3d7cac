# SPDX-License-Identifier: Apache-2.0
"""How a model's weights are stored, from the `quantization_config` of its file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Methods that store in 8-bit floats, whatever else they say.
_FP8 = ("fp8", "fbgemm_fp8")

#: How weights are stored, by the bits and the kind of a number.
_KINDS = {(4, "int"): "int4", (8, "int"): "int8", (8, "float"): "fp8"}


def stored(quantization: Mapping[str, Any]) -> str:
    """How the weights are stored: a key of `weights.BYTES`, else the name of the method."""
    method = str(quantization.get("quant_method", "not named"))
    if method in _FP8 or quantization.get("quant_algo") == "FP8":
        return "fp8"
    found = {_name(kind) for kind in _kinds(quantization)}
    name = found.pop() if len(found) == 1 else None
    return name or method


def _name(kind: tuple[Any, Any]) -> str | None:
    return next((name for known, name in _KINDS.items() if known == kind), None)


def _kinds(quantization: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """The bits and the kind of the numbers of each group of layers."""
    if quantization.get("load_in_4bit"):
        return [(4, "int")]
    if quantization.get("load_in_8bit"):
        return [(8, "int")]
    groups = (quantization.get("config_groups") or {}).values()
    weights = [group.get("weights") or {} for group in groups]
    kinds = [(each.get("num_bits"), each.get("type", "int")) for each in weights]
    bits = quantization.get("bits") or quantization.get("w_bit")
    return [*kinds, (bits, "int")] if bits else kinds
