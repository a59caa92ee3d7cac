# SPDX-License-Identifier: Apache-2.0
"""How many pages of vLLM's pool a request holds: page groups, padding and all.

vLLM cuts the layers into groups of equally many layers, each with a block table of its own. An
entry of any of these tables is a page of the one pool, with room for that many layers.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from entropykv_vllm.config.settings import EvictionConfig
from entropykv_vllm.plan.capacity import capacity
from entropykv_vllm.plan.model_shape import ModelShape
from entropykv_vllm.plan.schedule import TierPlan, boundary, held_pages, peak_pages
from entropykv_vllm.plan.tiers import Tier, make_tiers

#: Tokens of vLLM's own pages on a GPU, unless --block-size says otherwise.
FULL_PAGE = 16

#: Steps that may be under way at a time: vLLM schedules one while the other runs.
STEPS_IN_FLIGHT = 2


class Table(Protocol):
    """What a block table of a request holds, in pages."""

    def peak(self, tokens: int) -> int:
        """The most pages that vLLM counts for a request on its way to this length."""

    def held(self, tokens: int) -> int:
        """Pages after the step that wrote the last of these tokens while decoding."""


@dataclass(frozen=True)
class Evicted:
    """Layers of a tier."""

    plan: TierPlan

    def peak(self, tokens: int) -> int:
        return peak_pages(self.plan, tokens)

    def held(self, tokens: int) -> int:
        return held_pages(self.plan, boundary(self.plan, tokens - 1), tokens)


@dataclass(frozen=True)
class Whole:
    """Layers with full attention, as vLLM alone keeps them."""

    page: int

    def peak(self, tokens: int) -> int:
        return math.ceil(tokens / self.page)

    def held(self, tokens: int) -> int:
        return math.ceil(tokens / self.page)


@dataclass(frozen=True)
class Sliding:
    """Layers with a sliding window, which vLLM keeps in either case.

    It counts the window and the tokens of all steps under way, and a page for a window that
    starts within one.
    """

    page: int
    window: int
    in_flight: int

    def peak(self, tokens: int) -> int:
        return math.ceil(min(self.window - 1 + self.in_flight, tokens) / self.page) + 1

    def held(self, tokens: int) -> int:
        left = max(0, tokens - self.window)  # by the window of the newest token
        return math.ceil(tokens / self.page) - left // self.page


#: Layers of one kind, and what a table of some of them holds.
_Part = tuple[Sequence[int], Table]


@dataclass(frozen=True)
class Pool:
    """The pages of a server.

    Attributes:
        page_bytes: bytes of a page, that of all layers of a group.
        tables: what each block table of a request holds, in vLLM's order.
    """

    page_bytes: int
    tables: tuple[Table, ...]

    def peak(self, tokens: int) -> int:
        """The most pages that are counted for a request on its way to `tokens` tokens."""
        return sum(table.peak(tokens) for table in self.tables)

    def mean_held(self, tokens: int, answer: int) -> float:
        """Pages held on average while the last `answer` of `tokens` tokens are decoded."""
        steps = range(tokens - answer + 1, tokens + 1)
        return sum(table.held(step) for step in steps for table in self.tables) / answer

    def usable(self, room: int) -> int:
        """Pages for requests in `room` bytes; vLLM keeps one as its null page."""
        return max(0, room // self.page_bytes - 1)

    def longest(self, room: int, limit: int) -> int:
        """The longest request of at most `limit` tokens that fits into `room` bytes, 0 if none."""
        return longest(self.peak, self.usable(room), limit)

    def requests(self, room: int, tokens: int) -> int:
        """How many requests of `tokens` tokens fit into `room` bytes, all at their peak at once."""
        return self.usable(room) // self.peak(tokens)


def longest(peak: Callable[[int], int], usable: int, limit: int) -> int:
    """The longest request of at most `limit` tokens that fits, 0 if none.

    Args:
        peak: the most pages of a request of a length, which grow with it.
        usable: pages that there are.
        limit: tokens.
    """
    return bisect.bisect_right(range(1, limit + 1), usable, key=peak)


def full_pool(shape: ModelShape, step_tokens: int, page: int = FULL_PAGE) -> Pool:
    """The pool of vLLM alone, with a cache of 16 bits.

    Args:
        step_tokens: the most tokens of a step, vLLM's --max-num-batched-tokens.
        page: tokens per page.
    """
    parts: list[_Part] = [(shape.full_layers, Whole(page))]
    return _pool(shape, parts, page, 2, step_tokens)


def eviction_pool(
    shape: ModelShape, config: EvictionConfig, page: int, item_bytes: int, step_tokens: int
) -> Pool:
    """The pool of a server with eviction.

    Args:
        page: tokens per page.
        item_bytes: bytes of a number of the cache, 2 or 4.
        step_tokens: the most tokens of a step, vLLM's --max-num-batched-tokens.

    Raises:
        ValueError: if the settings do not fit the model or the page size, in words.
    """
    tiers = shape_tiers(shape, config, page, item_bytes)
    parts: list[_Part] = [(tier.layers, Evicted(tier.plan)) for tier in tiers]
    return _pool(shape, parts, page, item_bytes, step_tokens)


def shape_tiers(
    shape: ModelShape, config: EvictionConfig, page: int, item_bytes: int
) -> tuple[Tier, ...]:
    """The tiers of a model's full-attention layers.

    Raises:
        ValueError: if the settings do not fit the model or the page size, in words.
    """
    fits: Callable[[int], int] = partial(capacity, shape.head_size, page, item_bytes)
    return make_tiers(config, shape.full_layers, page, fits)


def _pool(
    shape: ModelShape,
    parts: list[_Part],
    page: int,
    item_bytes: int,
    step_tokens: int,
) -> Pool:
    in_flight = STEPS_IN_FLIGHT * step_tokens
    for window in {window for window in shape.windows if window is not None}:
        layers = tuple(i for i, other in enumerate(shape.windows) if other == window)
        parts.append((layers, Sliding(page, window, in_flight)))
    # vLLM's order, in which pages are taken and given back.
    parts = sorted((part for part in parts if part[0]), key=lambda part: min(part[0]))
    group = group_layers([len(layers) for layers, _ in parts])
    tables = [table for layers, table in parts for _ in range(math.ceil(len(layers) / group))]
    return Pool(group * page * shape.token_bytes(item_bytes), tuple(tables))


def group_layers(counts: list[int]) -> int:
    """Layers of a page group, from how many layers of each kind there are: as vLLM chooses.

    As many as the rarest kind has, or, where no kind has half as many again, as the commonest: the
    others are padded.
    """
    fewest, most = min(counts), max(counts)
    return most if most < 1.5 * fewest else fewest
