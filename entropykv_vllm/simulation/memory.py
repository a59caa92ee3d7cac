# SPDX-License-Identifier: Apache-2.0
"""The KV memory of a replica: its pool, and what requests hold in the tables over it.

vLLM's KV cache manager and its coordinator do the same for a server, in the same order; the order
decides which pages are lost first.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

from entropykv_vllm.plan.pool import Evicted, Sliding, Whole
from entropykv_vllm.plan.pool import Pool as Plan
from entropykv_vllm.simulation.job import Job
from entropykv_vllm.simulation.pool import Pool
from entropykv_vllm.simulation.sliding import SlidingTable
from entropykv_vllm.simulation.table import Found, Row, Table
from entropykv_vllm.simulation.tier import TierTable


class Memory:
    """The pages of one replica.

    Args:
        plan: its tables, as `entropykv plan` counts them.
        pages: of the pool, vLLM's null page not counted.
        caching: whether there is a prefix cache.
        in_flight: the most tokens of the steps that may be under way at a time.
        ahead: whether a step is planned while another runs.
    """

    def __init__(
        self, plan: Plan, pages: int, caching: bool, in_flight: int, ahead: bool = False
    ) -> None:
        self.pool = Pool(pages)
        self.caching = caching
        self.tables = [_table(table, self.pool, caching, in_flight) for table in plan.tables]
        self._unwritten: list[Row] = []
        self._read: list[Job] = []  # requests that were let in and, when last looked, still read
        self.page = self.tables[0].page
        self.busy = {place for table in self.tables for place in table.busy()}
        if ahead and any(isinstance(table, SlidingTable) for table in self.tables):
            self.busy = set(range(self.page))  # a window moves when a step ends: always look
        self.kinds = _kinds(self.tables)

    @property
    def held(self) -> int:
        """Pages that requests hold; one that several hold is one."""
        return self.pool.pages - self.pool.free

    def find(self, names: Sequence[Hashable], known: int) -> tuple[list[Found], int, int]:
        """The longest prefix that every table finds, short of the last token.

        Returns:
            What was found for each table; the tokens of it; and those that some tables found, if
            that is more, else 0.
        """
        rows: list[Found] = [[] for _ in self.tables]
        if not self.caching:
            return rows, 0, 0
        hit, longest, whole = known - 1, 0, False
        while True:
            length = hit
            for kind, tables in enumerate(self.kinds):
                if whole and kind == 0:
                    length = min(length, len(rows[tables[0]]) * self.page)
                    continue
                twins = [self.tables[i] for i in tables]
                found, length = twins[0].find(twins, names, length)
                longest = max(longest, length)
                whole = whole or (kind == 0 and type(twins[0]) is Table)
                for i, row in zip(tables, found, strict=True):
                    rows[i] = row
            if length >= hit or len(self.kinds) == 1:
                break
            hit = length
            if whole and len(self.kinds) == 2:
                break
        if whole:
            for i in self.kinds[0]:
                del rows[i][length // self.page :]
        return rows, length, longest if longest > length else 0

    def admit(self, job: Job, found: list[Found], hit: int, count: int) -> bool:
        """Let a waiting request in with its next tokens, if all of it fits; whether it did."""
        free, tokens = self.pool.free, hit + count
        pairs = list(zip(self.tables, found, strict=True))
        needed = sum(table.admitting(job.known, row, hit) for table, row in pairs)
        if needed + self._reserved() > free:
            return False
        if sum(table.starting(tokens, row, hit) for table, row in pairs) > free:
            return False
        job.rows = [Row(whole=job.known) for _ in self.tables]
        for (table, pages), row in zip(pairs, job.rows, strict=True):
            table.adopt(row, pages, hit)
        self._take(job, tokens)
        job.steady = False
        self._read.append(job)
        return True

    def _reserved(self) -> int:
        """Pages that requests which are still being read will take."""
        self._read = [
            job
            for job in self._read
            if job.rows and len(job.rows[0].pages) * self.page < job.rows[0].whole
        ]
        return sum(
            table.reserved(row)
            for job in self._read
            for table, row in zip(self.tables, job.rows, strict=True)
        )

    def grow(self, job: Job, count: int) -> bool:
        """Give a running request pages for its next tokens; whether there were enough.

        What it no longer needs is let go of in either case.
        """
        start = job.computed
        if count == 1 and job.steady and start % self.page not in self.busy:
            return True
        processed = start - job.in_flight
        for table, row in zip(self.tables, job.rows, strict=True):
            table.settle(row, processed)
        job.held = sum(row.held for row in job.rows)
        needed = 0
        for table, row in zip(self.tables, job.rows, strict=True):
            needed += table.growing(row, start + count)
        if needed > self.pool.free:
            return False
        self._take(job, start + count)
        job.steady = count == 1
        return True

    def _take(self, job: Job, tokens: int) -> None:
        for table, row in zip(self.tables, job.rows, strict=True):
            table.grow(row, tokens)
        self.name(job, min(tokens, job.known))
        job.held = sum(row.held for row in job.rows)

    def name(self, job: Job, tokens: int) -> None:
        """Let the prefix cache find the pages that so many tokens of a request fill."""
        if self.caching:
            resumes = job.prompt - 1, job.junction
            for table, row in zip(self.tables, job.rows, strict=True):
                table.name(row, job.names, tokens, resumes)
            self._unwritten += job.rows
        job.filled = (tokens // self.page + 1) * self.page

    def written(self) -> None:
        """End the planning of a step: what was named until now stays named."""
        for row in self._unwritten:
            row.unwritten.clear()
        self._unwritten.clear()

    def release(self, job: Job) -> None:
        """Take all pages from a request, if it has any."""
        for table, row in zip(self.tables, job.rows, strict=False):
            table.release(row)
        job.rows, job.held, job.steady = [], 0, False


def _table(plan: object, pool: Pool, caching: bool, in_flight: int) -> Table:
    if isinstance(plan, Evicted):
        return TierTable(plan, pool, caching)
    if isinstance(plan, Sliding):
        return SlidingTable(replace(plan, in_flight=in_flight), pool, caching)
    assert isinstance(plan, Whole)
    return Table(plan.page, plan, pool, caching)


def _kinds(tables: Sequence[Table]) -> list[list[int]]:
    """The places of tables that are searched together, those that keep every token first."""
    kinds: list[list[int]] = []
    for i, table in enumerate(tables):
        for kind in kinds:
            if tables[kind[0]].plan == table.plan:
                kind.append(i)
                break
        else:
            kinds.append([i])
    return sorted(kinds, key=lambda kind: type(tables[kind[0]]) is not Table)
