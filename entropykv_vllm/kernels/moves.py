# SPDX-License-Identifier: Apache-2.0
"""Carrying out planned moves: which op, and whose scores."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import Tensor

from entropykv_vllm.config.settings import EvictionConfig
from entropykv_vllm.kernels import native, ops
from entropykv_vllm.kernels.formats import cold_capacity, read_cold
from entropykv_vllm.kernels.scores import OBSERVED, SCORES
from entropykv_vllm.plan.schedule import MoveKind


@dataclass(frozen=True)
class Batch:
    """Moves of one kind and shape in tiers of `bits` bits, in their order.

    `src`, int64 ``[moves, s]``, and `dst`, int64 ``[moves, m]``, are pages; `sinks`, integers
    ``[moves]``, are the leading tokens that must stay.
    """

    kind: MoveKind
    bits: int
    src: Tensor
    dst: Tensor
    sinks: Tensor

    @property
    def bits_read(self) -> int:
        """The bits of the `src` pages: hot ones have 16."""
        return 16 if self.kind == "collapse" else self.bits

    def singly(self) -> Iterator[Batch]:
        """The moves one by one."""
        parts = self.src.split(1), self.dst.split(1), self.sinks.split(1)
        for src, dst, sinks in zip(*parts, strict=True):
            yield replace(self, src=src, dst=dst, sinks=sinks)


def carry_out(cache: Tensor, batch: Batch, settings: EvictionConfig, side: Tensor | None) -> None:
    """Carry out moves on one layer's pages.

    Args:
        cache: the layer's, written in place, as in `kernels.reference`.
        batch: the moves.
        settings: the policy and the selection.
        side: float32 ``[pages, heads, slots]``, written in place: the attention masses if the
            policy reads them, else any numbers that are to travel with their tokens.
    """
    if settings.policy in native.SCORES:
        move(cache, batch, settings, side=side)
        return
    # A move may read what the one before it wrote, so its scores can be made only then.
    for one in batch.singly():
        move(cache, one, settings, _scores(settings.policy, cache, one, side), side)


def move(
    cache: Tensor,
    batch: Batch,
    settings: EvictionConfig,
    scores: Tensor | None = None,
    side: Tensor | None = None,
) -> None:
    """As `carry_out`, by scores ``[moves, heads, tokens]`` or else the kernels' own.

    Args:
        cache: as there, and so are `batch` and `settings`.
        batch: the moves.
        settings: the policy and the selection.
        scores: float32 ``[moves, heads, tokens]``, made before the first of the moves.
        side: as there.
    """
    pages = batch.src, batch.dst, batch.sinks
    given = None if scores is None else scores.contiguous()
    # Cold pages of 16 bits are hot pages to the kernels: their tokens compete again.
    if batch.kind == "drop" and batch.bits < 16:
        ops.drop(cache, *pages, settings.policy, batch.bits, given, side)
        return
    bits = batch.bits_read, batch.bits
    ops.collapse(cache, *pages, settings.policy, *settings.selection, *bits, given, side)


def _scores(policy: str, cache: Tensor, batch: Batch, mass: Tensor | None) -> Tensor:
    """Scores ``[moves, heads, tokens]`` that the kernels do not know."""
    if policy in OBSERVED:
        assert mass is not None
        held = mass[batch.src][..., : cold_capacity(cache, batch.bits_read)]
        return OBSERVED[policy].score(held.transpose(1, 2).flatten(2))
    read = read_cold(cache, batch.src, batch.bits_read)
    keys, values = (x.transpose(1, 2).flatten(2, 3) for x in read)
    return SCORES[policy](keys, values)
