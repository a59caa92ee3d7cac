# SPDX-License-Identifier: Apache-2.0
"""Finding the pages of a token prefix, hot and cold, in vLLM's prefix cache."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import TypeVar

from entropykv_vllm.plan.schedule import (
    ColdPage,
    TierPlan,
    boundary,
    hot_start,
    newest_cold_pages,
)

Page = TypeVar("Page")
#: What names the content of a page: hashes in a server, anything hashable in a simulation.
Name = TypeVar("Name")
#: Returns the cached page (one per KV cache group) of a content's name, or None.
Lookup = Callable[[Name], Page | None]
#: Returns the name of a cold page from those of the request's full pages.
Naming = Callable[[ColdPage, Sequence[Name]], Name]


def content_hash(page: ColdPage, prefix_hashes: Sequence[bytes]) -> bytes:
    """The key of a cold page: a plain page's is vLLM's own, others are derived from it."""
    prefix = prefix_hashes[page.anchor]
    if page.kind == "plain":
        return prefix
    return hashlib.sha256(prefix + f"/{page.kind}/{page.index}".encode()).digest()


def longest_hit(
    plan: TierPlan,
    prefix_hashes: Sequence[Name],
    limit: int,
    alignment: int,
    lookup: Lookup[Name, Page],
    naming: Naming[Name],
) -> tuple[dict[int, Page], int]:
    """The longest prefix whose exact state is cached.

    A prefix of `n` tokens is a hit if each cold page of the last boundary before `n` is cached,
    and each hot page from there on.

    Args:
        plan: the tier.
        prefix_hashes: the name of the prefix up to the end of each full page of the request;
            vLLM's chained hash.
        limit: the longest hit that is of use, in tokens.
        alignment: the hit is a multiple of this many tokens.
        lookup: finds a page by the name of its content.
        naming: names a cold page; `content_hash`, in a server.

    Returns:
        The page of each table entry that is not a hole, and the length of the hit in tokens.
    """
    at = boundary(plan, limit := min(limit, len(prefix_hashes) * plan.page))
    while at >= 0:
        pages, ceiling = _cold(plan, at, prefix_hashes, lookup, naming)
        if ceiling is None:
            end = min(limit, at + plan.interval - plan.page)
            length = _extend(plan, at, end, prefix_hashes, lookup, pages)
            hit = length - length % alignment
            if hit >= max(at, plan.page):
                return {e: p for e, p in pages.items() if e * plan.page < hit}, hit
            ceiling = length
        at = boundary(plan, min(ceiling, at - 1)) if at > 0 else -1
    return {}, 0


def _cold(
    plan: TierPlan,
    at: int,
    prefix_hashes: Sequence[Name],
    lookup: Lookup[Name, Page],
    naming: Naming[Name],
) -> tuple[dict[int, Page], int | None]:
    """The cold pages at boundary `at`; if one is missing, the last position worth a try instead."""
    pages: dict[int, Page] = {}
    for cold in newest_cold_pages(plan, at):  # which are the likeliest to be missing
        page = lookup(naming(cold, prefix_hashes))
        if page is None:
            needless = plan.window + (cold.anchor + 1) * plan.page - 1
            return {}, at - 1 if cold.kind == "drop" else needless
        pages[cold.entry] = page
    return pages, None


def _extend(
    plan: TierPlan,
    at: int,
    end: int,
    prefix_hashes: Sequence[Name],
    lookup: Lookup[Name, Page],
    pages: dict[int, Page],
) -> int:
    """Add the hot pages from boundary `at` on, up to `end`; the tokens covered then."""
    entry = hot_start(plan, at) // plan.page
    while (entry + 1) * plan.page <= end and (page := lookup(prefix_hashes[entry])) is not None:
        pages[entry] = page
        entry += 1
    return entry * plan.page
