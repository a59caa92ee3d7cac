# SPDX-License-Identifier: Apache-2.0
"""The block table of a page group whose layers keep every token, as vLLM alone manages them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from entropykv_vllm.plan.pool import Table as Plan
from entropykv_vllm.plan.schedule import ColdPage
from entropykv_vllm.simulation.pool import Page, Pool, Shelf

#: What a prefix hit finds for a table: a page of each entry, None where there is a hole.
Found = list[Page | None]


@dataclass(slots=True)
class Row:
    """What one request holds in one table.

    Attributes:
        pages: by entry; None is a hole.
        held: how many entries are no hole.
        named: entries from the start on that were entered in the prefix cache, if they are pages.
        at: the boundary whose moves were last carried out, in tokens.
        moves_done: how many moves of the next boundary were.
        unnamed: cold pages that are to be entered in the prefix cache.
        stuck: whether a move found no page, so that the request cannot go on.
        dropped: entries from the start on that a sliding window has left.
        whole: the tokens that the request had when it was let in.
        unwritten: pages of a tier that were entered in the prefix cache since the last step was
            planned, which takes them out again if the request lets go of them.
    """

    pages: Found = field(default_factory=list)
    held: int = 0
    named: int = 0
    at: int = 0
    moves_done: int = 0
    unnamed: list[tuple[Page, ColdPage]] = field(default_factory=list)
    stuck: bool = False
    dropped: int = 0
    whole: int = 0
    unwritten: list[Page] = field(default_factory=list)


class Table:
    """Of layers with full attention.

    Args:
        page: tokens of a page.
        plan: says how many pages admit a request; tables with equal plans are searched together.
        pool: where pages come from.
        caching: whether there is a prefix cache.
    """

    def __init__(self, page: int, plan: Plan, pool: Pool, caching: bool) -> None:
        self.page, self.plan, self.pool, self.caching = page, plan, pool, caching
        self.shelf = Shelf()

    def busy(self) -> set[int]:
        """The positions within a page at which the next token changes what is held or found."""
        return {0, self.page - 1}

    def settle(self, row: Row, tokens: int) -> None:
        """Let go of what a request of so many finished tokens no longer needs: nothing."""

    def admitting(self, tokens: int, found: Found, hit: int) -> int:
        """Free pages with which a request of so many tokens is admitted after a prefix hit."""
        return self.starting(tokens, found, hit)

    def reserved(self, row: Row) -> int:
        """Pages to keep free for a request that was let in: vLLM alone keeps none."""
        return 0

    def starting(self, tokens: int, found: Found, hit: int) -> int:
        """Free pages that a request takes for its first tokens, the prefix hit included."""
        return max(-(-tokens // self.page) - len(found), 0) + unheld(found)

    def growing(self, row: Row, tokens: int) -> int:
        """Free pages that a request takes to hold so many tokens."""
        if row.stuck:
            return self.pool.pages + 1
        return max(-(-tokens // self.page) - len(row.pages), 0)

    def adopt(self, row: Row, found: Found, hit: int) -> None:
        """Hold the pages of a prefix hit."""
        pages = [page for page in found if page is not None]
        self.pool.hold(pages)
        row.pages, row.held, row.named = found, len(pages), len(found)

    def grow(self, row: Row, tokens: int) -> None:
        """Take pages for so many tokens."""
        if (count := -(-tokens // self.page) - len(row.pages)) > 0:
            row.pages.extend(self.pool.take(count))
            row.held += count

    def name(
        self, row: Row, names: Sequence[Hashable], tokens: int, resumes: Sequence[int]
    ) -> None:
        """Enter the pages that so many tokens fill in the prefix cache.

        Args:
            names: of the request's full pages.
            resumes: tokens after which another request is likely to go on.
        """
        full = tokens // self.page
        for entry in range(row.named, full):
            page = row.pages[entry]
            if page is not None and self.worth(entry, resumes):
                self.shelf.enter(names[entry], page)
        row.named = max(row.named, full)

    def worth(self, entry: int, resumes: Sequence[int]) -> bool:
        """Whether a page is entered in the prefix cache at all."""
        return True

    def release(self, row: Row) -> None:
        """Give back all that a request holds, the last pages first."""
        self.pool.give_back([page for page in reversed(row.pages) if page is not None])

    def find(
        self, twins: Sequence[Table], names: Sequence[Hashable], limit: int
    ) -> tuple[list[Found], int]:
        """The longest prefix of at most `limit` tokens that is found in some tables of equal plans.

        Returns:
            What was found for each table, and the tokens of it.
        """
        shelves = [table.shelf.first for table in twins]
        count = limit // self.page
        for shelf in shelves:  # the first entry that one of them misses
            count = next((i for i in range(count) if names[i] not in shelf), count)
        return [[shelf[name] for name in names[:count]] for shelf in shelves], count * self.page


def unheld(found: Sequence[Page | None]) -> int:
    """How many of the pages that were found are free until they are adopted."""
    return sum(page is not None and page.holders == 0 for page in found)
