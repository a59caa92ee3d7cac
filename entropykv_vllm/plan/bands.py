# SPDX-License-Identifier: Apache-2.0
"""Which share of a request's old tokens a tier still holds, stretch by stretch."""

from __future__ import annotations

from dataclasses import dataclass

from entropykv_vllm.plan.schedule import (
    TierPlan,
    cold_count,
    collapsed_segments,
    hot_start,
    newest_runs,
    run_pages,
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
    old = hot_start(plan, at)
    if old == 0:
        return []
    if plan.cap is not None:
        return [Band(0, old, cold_count(plan, at) * plan.cold / old)]
    found = [_band(plan, *run) for run in newest_runs(plan, collapsed_segments(plan, at))]
    return found[::-1]


def _band(plan: TierPlan, segment: int, level: int) -> Band:
    first, length = segment * plan.segment, plan.segment << level
    return Band(first, first + length, len(run_pages(plan, segment, level)) * plan.cold / length)
