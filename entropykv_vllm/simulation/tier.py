# SPDX-License-Identifier: Apache-2.0
"""The block table of a tier: what `pages.manager` does in a server, on counts and names alone."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from entropykv_vllm.pages.hits import longest_hit
from entropykv_vllm.plan.pool import Evicted
from entropykv_vllm.plan.schedule import (
    ColdPage,
    Move,
    boundary,
    moves,
    peak_pages,
    reserved_pages,
)
from entropykv_vllm.simulation.pool import Page, Pool
from entropykv_vllm.simulation.table import Found, Row, Table, unheld


class TierTable(Table):
    """Old pages are collapsed, merged and dropped at boundaries."""

    def __init__(self, plan: Evicted, pool: Pool, caching: bool) -> None:
        super().__init__(plan.plan.page, plan, pool, caching)
        self.tier = plan.plan
        self._moves: dict[int, tuple[Move, ...]] = {}

    def settle(self, row: Row, tokens: int) -> None:
        row.stuck = False
        while row.at + self.tier.interval <= tokens:
            if not self._advance(row):
                row.stuck = True
                return

    def _advance(self, row: Row) -> bool:
        at = row.at + self.tier.interval
        if (planned := self._moves.get(at)) is None:
            planned = self._moves[at] = moves(self.tier, at)
        for move in planned[row.moves_done :]:
            if not self._move(row, move):
                return False
            row.moves_done += 1
        row.at, row.moves_done = at, 0
        return True

    def _move(self, row: Row, move: Move) -> bool:
        pages = row.pages
        src = [page for entry in move.src if (page := pages[entry]) is not None]
        dst = self._destination(src, len(move.dst))
        if dst is None:
            return False
        in_place = bool(dst) and dst[0] is src[0]
        freed = src[len(dst) :] if in_place else src
        if self.caching:
            self._await_names(row, src, dst, move)
        row.held += len(dst) - len(src)
        for i, entry in enumerate(move.src):
            pages[entry] = dst[i] if i < len(dst) else None
        self.pool.give_back(reversed(freed))
        return True

    def _destination(self, src: list[Page], count: int) -> list[Page] | None:
        own = src[:count]
        if all(page.holders == 1 for page in own):
            named = [page for page in own if page.name is not None]
            if not named or self.pool.free < count:
                for page in named:
                    assert page.shelf is not None
                    page.shelf.remove(page)
                return own
        return self.pool.take(count) if self.pool.free >= count else None

    def _await_names(self, row: Row, src: list[Page], dst: list[Page], move: Move) -> None:
        if row.unnamed:
            gone = set(src)
            row.unnamed = [entry for entry in row.unnamed if entry[0] not in gone]
        row.unnamed += zip(dst, move.dst, strict=True)

    def admitting(self, tokens: int, found: Found, hit: int) -> int:
        adopted = sum(page is not None for page in found)
        return max(0, peak_pages(self.tier, tokens) - adopted) + unheld(found)

    def reserved(self, row: Row) -> int:
        return reserved_pages(self.tier, row.at, len(row.pages), row.whole)

    def adopt(self, row: Row, found: Found, hit: int) -> None:
        super().adopt(row, found, hit)
        row.at = boundary(self.tier, hit)

    def name(
        self, row: Row, names: Sequence[Hashable], tokens: int, resumes: Sequence[int]
    ) -> None:
        named = row.named
        super().name(row, names, tokens, resumes)
        row.unwritten += [page for page in row.pages[named : row.named] if page is not None]
        for page, cold in row.unnamed:
            self.shelf.enter(content_name(cold, names), page)
            row.unwritten.append(page)
        row.unnamed = []

    def release(self, row: Row) -> None:
        for page in row.unwritten:
            if page.shelf is not None:
                page.shelf.remove(page)
        super().release(row)

    def find(
        self, twins: Sequence[Table], names: Sequence[Hashable], limit: int
    ) -> tuple[list[Found], int]:
        """The longest prefix whose state at its last boundary is found."""
        shelves = [table.shelf.first for table in twins]

        def lookup(name: Hashable) -> list[Page] | None:
            found = [page for shelf in shelves if (page := shelf.get(name)) is not None]
            return found if len(found) == len(shelves) else None

        pages, hit = longest_hit(self.tier, names, limit, self.page, lookup, content_name)
        entries = range(hit // self.page)
        none: list[None] = [None] * len(shelves)
        columns = [pages.get(entry, none) for entry in entries]
        return [[column[i] for column in columns] for i in range(len(shelves))], hit


def content_name(cold: ColdPage, names: Sequence[Hashable]) -> Hashable:
    """The name of a cold page's content: `pages.hits.content_hash`, without hashing."""
    prefix = names[cold.anchor]
    return prefix if cold.kind == "plain" else (prefix, cold.kind, cold.index)
