# SPDX-License-Identifier: Apache-2.0
"""How often pages are freed: as the peak of a request has it, which no text need be read for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from entropykv_vllm.plan.schedule import TierPlan, peak_pages


def least_peak(plans: Sequence[TierPlan], tokens: int) -> int:
    """Return the interval with which a request of `tokens` tokens peaks lowest.

    Tried are all whole pages from one segment to two. With less, boundaries come at which nothing
    is old enough, and a prompt is read in shorter steps; with more, the newest tokens weigh more.
    Of equal ones the longest is returned, which is read fastest.

    Args:
        plans: of each layer; their own intervals do not matter.
        tokens: the longest context that the model reads.
    """
    segment = max(plan.segment for plan in plans)

    def peak(interval: int) -> int:
        return sum(peak_pages(replace(plan, interval=interval), tokens) for plan in plans)

    lengths = range(segment, 2 * segment + 1, plans[0].page)
    return min(lengths, key=lambda interval: (peak(interval), -interval))
