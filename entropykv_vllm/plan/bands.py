# SPDX-License-Identifier: Apache-2.0
"""Which share of a request's old tokens a tier still holds, stretch by stretch."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from entropykv_vllm.plan.schedule import (
    TierPlan,
    cold_count,
    collapsed_segments,
    newest_runs,
    run_pages,
    unprotected,
    unprotected_segment,
)


@dataclass(frozen=True)
class Band:
    """Tokens `first` to `end` (not included), of which a layer's KV head holds `share`, 0 to 1."""

    first: int
    end: int
    share: float


def bands(plan: TierPlan, at: int) -> list[Band]:
    """The stretches of tokens older than the hot ones at boundary `at`, in order.

    A stretch is as long as it must be for its share to follow from the position alone: what was
    merged to one page, or, where cold pages are capped and compete with each other, all of it.
    """
    shares = [1.0] * collapsed_segments(plan, at)  # what is protected stays so
    for number, share in enumerate(_competing(plan, at)):
        shares[unprotected_segment(plan, number)] = share
    found, first = [], 0
    for share, alike in groupby(shares):
        end = first + len(list(alike)) * plan.segment
        found.append(Band(first, end, share))
        first = end
    return found


def _competing(plan: TierPlan, at: int) -> list[float]:
    """The shares of the segments that compete for places, in order."""
    segments = collapsed_segments(plan, at)
    count = unprotected(plan, segments)
    if plan.cap is not None:
        protected = (segments - count) * plan.segment
        held = cold_count(plan, at) * plan.cold - protected
        return [held / (count * plan.segment) for _ in range(count)]
    shares: list[float] = []
    for start, level in reversed(list(newest_runs(plan, count))):
        held = len(run_pages(plan, start, level)) * plan.cold
        shares += [held / (plan.segment << level)] * (1 << level)
    return shares
