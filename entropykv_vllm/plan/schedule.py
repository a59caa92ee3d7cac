# SPDX-License-Identifier: Apache-2.0
"""What a tier of a request holds at each position: the arithmetic of segments and boundaries.

Everything here is a function of the number of tokens alone, so the scheduler and the workers,
the memory check at start-up and the admission of a request cannot disagree.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, islice
from operator import sub
from typing import Literal

#: How a page got its content; with `ColdPage.anchor` and `ColdPage.index` it names that content.
Kind = Literal["plain", "segment", "merge", "drop"]

#: What a move reads: hot pages, whose best tokens stay; cold pages, whose best tokens stay; or cold
#: pages, of which the best stay whole.
MoveKind = Literal["collapse", "merge", "drop"]


@dataclass(frozen=True)
class TierPlan:
    """The geometry of one tier; all lengths in tokens, and the same for each of its layers.

    A hot page holds up to `page` tokens. A cold one has as many bytes and always holds `cold`
    tokens, of `bits` bits a number. `segment` is a whole number of both, `interval` of hot pages.
    `keep` is the share of the tokens older than `window` that survive; `cap` bounds the tokens
    held in cold pages. Segments of the ranges `protected`, in their order, keep all tokens: they
    stand aside, and what is said of runs below is said of the other segments, one after another.
    `fixed` says that the settings name this tier's own `keep`.
    """

    name: str
    page: int
    cold: int
    segment: int
    interval: int
    window: int
    keep: float
    sinks: int
    cap: int | None = None
    bits: int = 16
    protected: tuple[tuple[int, int], ...] = ()
    fixed: bool = False

    @property
    def segment_pages(self) -> int:
        return self.segment // self.page

    @cached_property
    def share(self) -> float:
        """Cold pages of a segment's survivors, on average."""
        return self.keep * self.segment / self.cold

    @cached_property
    def levels(self) -> int:
        """How often pages are merged by twos, so that what stays of a run fills a page.

        Without it a small keep ratio would take all tokens of some segments and none of others.
        """
        if self.cap is not None or not 0 < self.share < 1:
            return 0
        return math.ceil(-math.log2(self.share) - 1e-9)

    @cached_property
    def firsts(self) -> tuple[int, ...]:
        """The first segment of each protected range."""
        return tuple(first for first, _ in self.protected)

    @cached_property
    def covered(self) -> tuple[int, ...]:
        """The protected segments before each of the ranges, and all."""
        return tuple(accumulate((end - first for first, end in self.protected), initial=0))

    @cached_property
    def competing(self) -> tuple[int, ...]:
        """The segments before each protected range that compete for places."""
        return tuple(map(sub, self.firsts, self.covered))

    @property
    def cap_pages(self) -> int | None:
        """The most cold pages held, if they are capped."""
        return None if self.cap is None else self.cap // self.cold

    @property
    def compresses(self) -> bool:
        """Whether old pages are ever moved: evicted from, or only quantized."""
        return self.keep < 1 or self.cap is not None or self.bits < 16


@dataclass(frozen=True, slots=True)
class ColdPage:
    """A page of survivors: its table entry, and the name of its content.

    The content is fixed by the tokens before page entry `anchor + 1`, the kind and the index (of
    a merged page, its level).
    """

    entry: int
    anchor: int
    kind: Kind
    index: int


@dataclass(frozen=True, slots=True)
class Move:
    """Read the pages at `src` entries, keep the best `len(dst)` cold pages of tokens, at `dst`.

    `sinks` is the number of leading tokens that must survive.
    """

    src: tuple[int, ...]
    dst: tuple[ColdPage, ...]
    sinks: int
    kind: MoveKind


def boundary(plan: TierPlan, tokens: int) -> int:
    """The last boundary at or before a position, in tokens."""
    return tokens // plan.interval * plan.interval


def next_boundary(interval: int, tokens: int) -> int:
    """The first boundary after a position, in tokens."""
    return (tokens // interval + 1) * interval


def collapsed_segments(plan: TierPlan, at: int) -> int:
    """How many segments lie wholly before the recency window at boundary `at`."""
    return max(0, at - plan.window) // plan.segment if plan.compresses else 0


def is_protected(plan: TierPlan, segment: int) -> bool:
    """Whether a segment keeps all its tokens by a request's wish."""
    ranges = bisect_right(plan.firsts, segment)
    return ranges > 0 and segment < plan.protected[ranges - 1][1]


def unprotected(plan: TierPlan, segments: int) -> int:
    """How many of the first `segments` segments compete for places."""
    ranges = bisect_left(plan.firsts, segments)
    if ranges == 0:
        return segments
    first, end = plan.protected[ranges - 1]
    return segments - plan.covered[ranges - 1] - (min(end, segments) - first)


def unprotected_segment(plan: TierPlan, number: int) -> int:
    """The segment that is the `number`-th, from 0 on, of those that compete for places."""
    return number + plan.covered[bisect_right(plan.competing, number)]


def hot_start(plan: TierPlan, at: int) -> int:
    """The first token, a page's first, that is still in a hot page at boundary `at`."""
    return collapsed_segments(plan, at) * plan.segment


def survivors(plan: TierPlan, runs: int) -> int:
    """Cold pages left of the first `runs` runs, before any cap.

    A run is what is merged in the end: `2 ** levels` segments. Rounded up over all of them rather
    than each, so that any keep ratio is met on average.
    """
    if runs == 0:
        return 0
    share = plan.share * 2**plan.levels
    if plan.cap is not None and plan.keep > 0:
        share = max(1.0, share)  # what is over the cap is dropped, after all have competed
    kept = math.ceil(round(share * runs, 6))
    return max(kept, math.ceil(plan.sinks / plan.cold))


def segment_pages(plan: TierPlan, segment: int) -> tuple[ColdPage, ...]:
    """The pages that a segment is collapsed to: its first entries."""
    count = _segment_count(plan, segment)
    first = segment * plan.segment_pages
    if plan.bits == 16 and count == plan.segment_pages:
        return tuple(ColdPage(first + i, first + i, "plain", 0) for i in range(count))
    last = first + plan.segment_pages - 1
    return tuple(ColdPage(first + i, last, "segment", i) for i in range(count))


def _segment_count(plan: TierPlan, segment: int) -> int:
    """How many pages a segment is collapsed to."""
    if is_protected(plan, segment):
        return plan.segment // plan.cold
    if plan.levels > 0:
        return 1
    number = unprotected(plan, segment)
    return survivors(plan, number + 1) - survivors(plan, number)


@lru_cache(maxsize=1 << 15)
def run_pages(plan: TierPlan, start: int, level: int) -> tuple[ColdPage, ...]:
    """The pages that are left of `2 ** level` segments from the `start`-th on, once merged."""
    if level == 0:
        return segment_pages(plan, unprotected_segment(plan, start))
    half = 2 ** (level - 1)
    if level == plan.levels:
        run = start // 2**level
        if survivors(plan, run + 1) - survivors(plan, run) > 1:
            return run_pages(plan, start, level - 1) + run_pages(plan, start + half, level - 1)
    first, last = (unprotected_segment(plan, n) for n in (start, start + 2 * half - 1))
    anchor = (last + 1) * plan.segment_pages - 1
    return (ColdPage(first * plan.segment_pages, anchor, "merge", level),)


def newest_runs(plan: TierPlan, segments: int) -> Iterator[tuple[int, int]]:
    """The runs that the first `segments` segments are merged to, the last first.

    Each is the number of its first segment and its level.
    """
    whole, levels = segments >> plan.levels, plan.levels
    for level in range(levels):
        if segments >> level & 1:
            yield segments >> level + 1 << level + 1, level
    yield from ((run << levels, levels) for run in range(whole - 1, -1, -1))


def cold_pages(plan: TierPlan, at: int) -> tuple[ColdPage, ...]:
    """The cold pages at boundary `at`, in the order of their entries."""
    return tuple(newest_cold_pages(plan, at))[::-1]


def newest_cold_pages(plan: TierPlan, at: int) -> Iterator[ColdPage]:
    """The cold pages at boundary `at`, the last first: who needs only a few stops in time."""
    competing = _newest_competing(plan, at)
    if not plan.protected:
        yield from competing
        return
    protected = _newest_protected(plan, collapsed_segments(plan, at))
    yield from heapq.merge(competing, protected, key=lambda page: -page.entry)


def _newest_competing(plan: TierPlan, at: int) -> Iterator[ColdPage]:
    if plan.cap is not None:
        yield from reversed(_capped(plan, at // plan.interval)[1])
        return
    for start, level in newest_runs(plan, unprotected(plan, collapsed_segments(plan, at))):
        yield from reversed(run_pages(plan, start, level))


def _newest_protected(plan: TierPlan, segments: int) -> Iterator[ColdPage]:
    for first, end in reversed(plan.protected[: bisect_left(plan.firsts, segments)]):
        for segment in range(min(end, segments) - 1, first - 1, -1):
            yield from reversed(segment_pages(plan, segment))


def moves(plan: TierPlan, at: int) -> tuple[Move, ...]:
    """What is to be moved at boundary `at`, given the state of the boundary before."""
    if plan.cap is not None:
        return _capped(plan, at // plan.interval)[0]
    return _fresh_moves(plan, at)


def _fresh_moves(plan: TierPlan, at: int) -> tuple[Move, ...]:
    """Collapse each segment that the window has left, and merge what that completes."""
    done = collapsed_segments(plan, at - plan.interval)
    return tuple(
        move
        for segment in range(done, collapsed_segments(plan, at))
        for move in (*_collapse(plan, segment), *_merges(plan, segment))
    )


def _collapse(plan: TierPlan, segment: int) -> tuple[Move, ...]:
    dst = segment_pages(plan, segment)
    if dst and dst[0].kind == "plain":
        return ()
    first = segment * plan.segment_pages
    src = tuple(range(first, first + plan.segment_pages))
    return (Move(src, dst, plan.sinks if segment == 0 else 0, "collapse"),)


def _merges(plan: TierPlan, segment: int) -> list[Move]:
    """What is merged once a segment is collapsed: as in a binary counter."""
    if is_protected(plan, segment):
        return []
    found, runs = [], unprotected(plan, segment + 1)
    for level in range(1, plan.levels + 1):
        start = runs - 2**level
        if runs % 2**level:
            break
        halves = (start, level - 1), (start + 2 ** (level - 1), level - 1)
        src = tuple(page.entry for half in halves for page in run_pages(plan, *half))
        dst = run_pages(plan, start, level)
        if len(dst) < len(src):
            found.append(Move(src, dst, plan.sinks if start == 0 else 0, "merge"))
    return found


@lru_cache(maxsize=1 << 16)
def _capped(plan: TierPlan, step: int) -> tuple[tuple[Move, ...], tuple[ColdPage, ...]]:
    """Moves and cold pages at the `step`-th boundary of a tier whose cold pages are capped.

    Pages of protected segments are not among them, as they do not count.
    """
    if step == 0:
        return (), ()
    for earlier in range(step % 256, step, 256):  # fill the cache from below: no deep recursion
        _capped(plan, earlier)
    at = step * plan.interval
    held = list(_capped(plan, step - 1)[1])
    for segment in range(
        collapsed_segments(plan, at - plan.interval), collapsed_segments(plan, at)
    ):
        held.extend(() if is_protected(plan, segment) else segment_pages(plan, segment))
    steps = list(_fresh_moves(plan, at))
    limit = plan.cap_pages
    assert limit is not None
    if len(held) > limit:
        drop = _drop(plan, held, limit, at)
        steps.append(drop)
        held = list(drop.dst)
    return tuple(steps), tuple(held)


def _drop(plan: TierPlan, held: list[ColdPage], limit: int, at: int) -> Move:
    anchor = at // plan.page - 1
    dst = tuple(ColdPage(held[i].entry, anchor, "drop", i) for i in range(limit))
    return Move(tuple(page.entry for page in held), dst, plan.sinks, "drop")


def cold_count(plan: TierPlan, at: int) -> int:
    """The number of cold pages at boundary `at`: `len(cold_pages(plan, at))`, cheaply."""
    segments = collapsed_segments(plan, at)
    competing = unprotected(plan, segments)
    whole, rest = divmod(competing, 2**plan.levels)
    count = survivors(plan, whole) + rest.bit_count()
    if plan.cap_pages is not None:
        count = min(count, plan.cap_pages)
    return count + (segments - competing) * (plan.segment // plan.cold)


def held_pages(plan: TierPlan, at: int, tokens: int) -> int:
    """Pages held by a request of `tokens` tokens whose last collapse was at boundary `at`."""
    return cold_count(plan, at) + math.ceil(tokens / plan.page) - hot_start(plan, at) // plan.page


def reserved_pages(plan: TierPlan, at: int, entries: int, whole: int) -> int:
    """Pages to keep free for a request that is let in and still being read.

    vLLM admits a request by the pages that are free when it comes, and then reads its prompt in
    large steps. Here prompts are read an interval a step, many side by side: without this they
    would all be let in, meet on the way to their peaks, and be preempted.

    Args:
        plan: of the tier.
        at: the boundary of the request's last collapse.
        entries: of its table so far.
        whole: its tokens when it was let in.
    """
    if entries * plan.page >= whole:
        return 0
    return max(0, peak_pages(plan, whole) - held_pages(plan, at, entries * plan.page))


def held_tokens(plan: TierPlan, at: int, tokens: int) -> int:
    """Tokens held by a request of `tokens` tokens whose last collapse was at boundary `at`."""
    return cold_count(plan, at) * plan.cold + tokens - hot_start(plan, at)


@lru_cache(maxsize=4096)
def peak_pages(plan: TierPlan, tokens: int) -> int:
    """The most pages that a request holds on its way from 0 to `tokens` tokens.

    The one figure used by the start-up memory check, the admission of a request and the tests.
    """
    intervals = max(0, tokens - 1) // plan.interval
    last = held_pages(plan, intervals * plan.interval, tokens)
    return max(_peaks(plan).of(intervals), last)


class _Peaks:
    """The most pages that a request holds within its first intervals, by their number.

    Asked for anew for each request with a wish and for many lengths, so it is counted once.
    """

    def __init__(self, plan: TierPlan) -> None:
        self.plan = plan
        self.known: tuple[int, ...] = (0,)

    def of(self, intervals: int) -> int:
        known, plan = self.known, self.plan  # a tuple: a server asks from several threads
        if len(known) <= intervals:
            starts = (i * plan.interval for i in range(len(known) - 1, intervals))
            held = (held_pages(plan, at, at + plan.interval) for at in starts)
            known += tuple(islice(accumulate(held, max, initial=known[-1]), 1, None))
            self.known = known
        return known[intervals]


_peaks = lru_cache(maxsize=128)(_Peaks)
