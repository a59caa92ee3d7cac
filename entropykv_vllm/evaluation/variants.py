# SPDX-License-Identifier: Apache-2.0
"""Ways to quantize keys and values, to be compared with that of our cold pages."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from entropykv_vllm.kernels.formats import FP16_MAX, dequantize, quantize, round_up
from entropykv_vllm.plan.capacity import GROUP


@dataclass(frozen=True)
class Side:
    """How the keys, or the values, of a head share their scales.

    Per "channel", `group` tokens of a channel share one; per "token", `group` channels of a token
    do, and all of them where it is None. Symmetric ones have no zero. Rotated ones are multiplied
    by a Hadamard matrix first, which spreads large channels over all.
    """

    per: Literal["channel", "token"]
    group: int | None = None
    symmetric: bool = False
    rotated: bool = False

    def __str__(self) -> str:
        unit = "tokens" if self.per == "channel" else "channels"
        parts = [f"{'rotated, ' if self.rotated else ''}per {self.per}"]
        parts += [f"groups of {self.group} {unit}"] if self.group else []
        return ", ".join(parts + ["symmetric"] * self.symmetric)

    def floats(self, head_size: int) -> float:
        """16-bit scales and zeros for each token."""
        return (1 if self.symmetric else 2) * head_size / (self.group or head_size)

    def roundtrip(self, x: Tensor, bits: int) -> Tensor:
        """What is left of `[..., tokens, head_size]`, float32, after its quantization."""
        if self.rotated:
            turn = hadamard(x.shape[-1])  # its own inverse
            return replace(self, rotated=False).roundtrip(x @ turn, bits) @ turn
        dim = -2 if self.per == "channel" else -1
        steps = symmetric if self.symmetric else quantize
        parts = x.split(self.group or x.shape[dim], dim)
        return torch.cat([dequantize(*steps(part, bits, dim)) for part in parts], dim)


@dataclass(frozen=True)
class Variant:
    """A way to store a head's tokens."""

    keys: Side
    values: Side
    bits: int = 4

    def share(self, head_size: int) -> float:
        """Bytes of a token, scales and zeros included, over those of 16 bits a number."""
        floats = self.keys.floats(head_size) + self.values.floats(head_size)
        return self.bits / 16 + floats / (2 * head_size)

    def replace_old(self, keys: Tensor, values: Tensor, window: int) -> tuple[Tensor, Tensor]:
        """Keys and values `[..., tokens, head_size]`, all but the last `window` quantized."""
        old = keys.shape[-2] - window
        sides = ((self.keys, keys), (self.values, values))
        first, second = (
            torch.cat([side.roundtrip(x[..., :old, :], self.bits), x[..., old:, :]], -2)
            for side, x in sides
        )
        return first, second


PER_TOKEN = Side("token")
OURS = Side("channel", GROUP)

VARIANTS = (
    Variant(OURS, PER_TOKEN, 8),
    Variant(OURS, PER_TOKEN),
    Variant(Side("channel", 32), PER_TOKEN),
    Variant(Side("channel", 128), PER_TOKEN),
    Variant(PER_TOKEN, PER_TOKEN),
    Variant(Side("token", symmetric=True), Side("token", symmetric=True)),
    Variant(Side("token", 32), Side("token", 32)),
    Variant(Side("token", rotated=True), PER_TOKEN),
    Variant(replace(OURS, rotated=True), PER_TOKEN),
)


def symmetric(x: Tensor, bits: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """As `formats.quantize`, with codes from -7 or -127 to as much and all zeros 0."""
    x = x.float().clamp(-FP16_MAX, FP16_MAX)
    last = 2 ** (bits - 1) - 1
    scale = round_up(x.abs().amax(dim, keepdim=True) / last)
    codes = (x / scale.float()).round().clamp(-last, last).where(scale > 0, 0.0)
    return codes.to(torch.int8), scale, torch.zeros_like(scale)


def hadamard(size: int) -> Tensor:
    """The normalized Hadamard matrix, float32 `[size, size]`, of a power of two.

    Raises:
        ValueError: for another size.
    """
    if size < 1 or size & (size - 1):
        raise ValueError(f"There is no such Hadamard matrix of size {size}.")
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
    return matrix / math.sqrt(size)
