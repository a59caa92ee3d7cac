# SPDX-License-Identifier: Apache-2.0
"""Carrying out planned moves: which op, and whose scores."""

from __future__ import annotations

from torch import Tensor

from entropykv_vllm.config.settings import EvictionConfig
from entropykv_vllm.kernels import native, ops
from entropykv_vllm.kernels.formats import cold_capacity, read_cold
from entropykv_vllm.kernels.scores import OBSERVED, SCORES
from entropykv_vllm.plan.schedule import MoveKind


def carry_out(
    cache: Tensor,
    kind: MoveKind,
    src: Tensor,
    dst: Tensor,
    sinks: Tensor,
    settings: EvictionConfig,
    bits: int,
    mass: Tensor | None,
) -> None:
    """Carry out moves of one kind and shape on one layer's pages, in their order.

    Args:
        cache: the layer's, written in place, as in `kernels.reference`.
        kind: see `plan.schedule.MoveKind`.
        src: int64 ``[moves, s]``.
        dst: int64 ``[moves, m]``.
        sinks: integers ``[moves]``.
        settings: the policy and the selection.
        bits: of the tier's cold pages.
        mass: float32 ``[pages, heads, slots]``, if the policy reads attention; written in place.
    """
    if settings.policy in native.SCORES:
        move(cache, kind, src, dst, sinks, settings, bits)
        return
    # A move may read what the one before it wrote, so its scores can be made only then.
    for one in zip(src.split(1), dst.split(1), sinks.split(1), strict=True):
        scores = _scores(settings.policy, cache, kind, one[0], bits, mass)
        move(cache, kind, *one, settings, bits, scores, mass)


def move(
    cache: Tensor,
    kind: MoveKind,
    src: Tensor,
    dst: Tensor,
    sinks: Tensor,
    settings: EvictionConfig,
    bits: int,
    scores: Tensor | None = None,
    side: Tensor | None = None,
) -> None:
    """As `carry_out`, by scores ``[moves, heads, tokens]`` or else the kernels' own.

    Args:
        side: float32 ``[pages, heads, slots]``, numbers that travel with their tokens.
    """
    policy = settings.policy
    given = None if scores is None else scores.contiguous()
    # Cold pages of 16 bits are hot pages to the kernels: their tokens compete again.
    if kind == "drop" and bits < 16:
        ops.drop(cache, src, dst, sinks, policy, bits, given, side)
        return
    read, choice = bits_read(kind, bits), settings.selection
    ops.collapse(cache, src, dst, sinks, policy, *choice, read, bits, given, side)


def bits_read(kind: MoveKind, bits: int) -> int:
    """The bits of the pages that a move of a tier with `bits` reads: hot ones have 16."""
    return 16 if kind == "collapse" else bits


def _scores(
    policy: str, cache: Tensor, kind: MoveKind, src: Tensor, bits: int, mass: Tensor | None
) -> Tensor:
    """Scores ``[moves, heads, tokens]`` that the kernels do not know."""
    read = bits_read(kind, bits)
    if policy in OBSERVED:
        assert mass is not None
        held = mass[src][..., : cold_capacity(cache, read)]
        return OBSERVED[policy].score(held.transpose(1, 2).flatten(2))
    keys, values = (x.transpose(1, 2).flatten(2, 3) for x in read_cold(cache, src, read))
    return SCORES[policy](keys, values)
