# SPDX-License-Identifier: Apache-2.0
"""The block table of a page group whose layers have a sliding window; vLLM's in either case."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from entropykv_vllm.plan.pool import Sliding
from entropykv_vllm.simulation.pool import Pool
from entropykv_vllm.simulation.table import Found, Row, Table, unheld


class SlidingTable(Table):
    """Pages before the window are given back."""

    def __init__(self, plan: Sliding, pool: Pool, caching: bool) -> None:
        super().__init__(plan.page, plan, pool, caching)
        self.window = plan.window
        self.needed = -(-(plan.window - 1) // plan.page)
        self.most = -(-(plan.window - 1 + plan.in_flight) // plan.page) + 1

    def busy(self) -> set[int]:
        return super().busy() | {(self.window - 1) % self.page}

    def _left(self, tokens: int) -> int:
        """Pages that the window of the next token has left."""
        return max(0, tokens - self.window + 1) // self.page

    def settle(self, row: Row, tokens: int) -> None:
        left = min(self._left(tokens), len(row.pages))
        if left > row.dropped:
            gone = row.pages[row.dropped : left]
            row.pages[row.dropped : left] = [None] * len(gone)
            self.pool.give_back([page for page in reversed(gone) if page is not None])
            row.held -= len(gone)
            row.dropped = left

    def admitting(self, tokens: int, found: Found, hit: int) -> int:
        return self._starting(min(-(-tokens // self.page), self.most), found, hit)

    def starting(self, tokens: int, found: Found, hit: int) -> int:
        return self._starting(-(-tokens // self.page), found, hit)

    def _starting(self, pages: int, found: Found, hit: int) -> int:
        left = self._left(hit)
        return max(pages - max(left, len(found)), 0) + unheld(found[left:])

    def adopt(self, row: Row, found: Found, hit: int) -> None:
        left = self._left(hit)
        holes: Found = [None] * left
        super().adopt(row, holes + found[left:], hit)
        row.dropped = left

    def worth(self, entry: int, resumes: Sequence[int]) -> bool:
        """vLLM enters the window before each place where another request is likely to go on."""
        ends = (tokens // self.page for tokens in resumes)
        return any(end - self.needed <= entry < end for end in ends)

    def find(
        self, twins: Sequence[Table], names: Sequence[Hashable], limit: int
    ) -> tuple[list[Found], int]:
        """The longest prefix whose window is found, or that is found whole."""
        shelves = [table.shelf.first for table in twins]
        run = last = 0
        for entry in range(limit // self.page - 1, -1, -1):
            if any(names[entry] not in shelf for shelf in shelves):
                run = 0
                continue
            last = entry if run == 0 else last
            run += 1
            if run >= self.needed:
                break
        first = last + 1 - run if run else 0
        if run < self.needed and first > 0:
            return [[] for _ in twins], 0
        rows: list[Found] = [[None] * first for _ in twins]
        for row, shelf in zip(rows, shelves, strict=True):
            row.extend(shelf[names[entry]] for entry in range(first, first + run))
        return rows, (first + run) * self.page
