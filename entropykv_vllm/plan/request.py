# SPDX-License-Identifier: Apache-2.0
"""What one request may ask for, and the geometry of a tier for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from entropykv_vllm.plan.schedule import TierPlan

#: Spans of tokens, ends excluded.
Spans = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Control:
    """How a request departs from the server's settings.

    Attributes:
        off: nothing of it is evicted, and nothing is quantized.
        keep: how many times the tokens that the server's settings keep; those of tiers whose own
            settings fix it, and all of the window, stay as they are.
        protect: tokens that must not be evicted; disjoint, in order.
    """

    off: bool = False
    keep: float = 1.0
    protect: Spans = ()


#: Asks for nothing.
AS_SERVED = Control()


@lru_cache(maxsize=1 << 12)
def request_plan(plan: TierPlan, control: Control) -> TierPlan:
    """The geometry of a tier for one request.

    Window, segments and boundaries are the server's, so the workers need not know.

    Args:
        plan: the tier's.
        control: what the request asks for.
    """
    if control.off:
        return replace(plan, keep=1.0, cap=None, bits=16, cold=plan.page)
    if not plan.fixed and control.keep != 1:
        plan = replace(plan, keep=min(1.0, round(plan.keep * control.keep, 9)))
    protected = _segments(control.protect, plan.segment)
    if not protected or not plan.compresses:
        return plan
    sinks = 0 if protected[0][0] == 0 else plan.sinks
    return replace(plan, protected=protected, sinks=sinks)


def _segments(spans: Iterable[tuple[int, int]], segment: int) -> Spans:
    """The segments that hold any token of the spans, as ranges."""
    return joined((first // segment, -(-end // segment)) for first, end in spans)


def joined(spans: Iterable[tuple[int, int]]) -> Spans:
    """The same numbers in ranges that are in order and do not touch; empty ones are left out."""
    found: list[tuple[int, int]] = []
    for first, end in sorted(span for span in spans if span[0] < span[1]):
        if found and first <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((first, end))
    return tuple(found)


def before(spans: Sequence[tuple[int, int]], tokens: int) -> Spans:
    """The parts of spans that lie before a position."""
    return tuple((first, min(end, tokens)) for first, end in spans if first < tokens)
