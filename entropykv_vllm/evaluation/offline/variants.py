# SPDX-License-Identifier: Apache-2.0
"""Scores that need what a served request does not keep: the positions of its old tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from entropykv_vllm.kernels.formats import read_cold
from entropykv_vllm.kernels.moves import Batch
from entropykv_vllm.kernels.scores import SCORES


def scores(
    name: str,
    cache: Tensor,
    batch: Batch,
    positions: Tensor,
    frequencies: Tensor,
) -> Tensor:
    """Scores ``[moves, heads, tokens]`` of the tokens that moves read, by a variant's name.

    Args:
        name: one of `VARIANTS`, or any score of `kernels.scores`.
        cache: the pages.
        batch: the moves.
        positions: int64 ``[moves, heads, tokens]``.
        frequencies: float32 ``[head_size / 2]``, radians a position, of the rotary embedding.
    """
    pages = read_cold(cache, batch.src, batch.bits_read)
    keys, values = (x.transpose(1, 2).flatten(2, 3).float() for x in pages)
    if name in VARIANTS:
        return VARIANTS[name](keys, values, positions, frequencies)
    return SCORES[name](keys, values)


def turned_back(keys: Tensor, positions: Tensor, frequencies: Tensor) -> Tensor:
    """Keys ``[..., tokens, head_size]`` as they were before the rotary embedding."""
    angle = positions[..., None] * frequencies
    cos, sin = angle.cos(), angle.sin()
    first, second = keys.chunk(2, -1)
    return torch.cat([first * cos + second * sin, second * cos - first * sin], -1)


def _unrotated(score: str) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    def variant(keys: Tensor, values: Tensor, positions: Tensor, frequencies: Tensor) -> Tensor:
        return SCORES[score](turned_back(keys, positions, frequencies), values)

    return variant


VARIANTS = {f"{name}-unrotated": _unrotated(name) for name in ("entropykv", "keydiff")}
