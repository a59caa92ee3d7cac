# SPDX-License-Identifier: Apache-2.0
"""The model runners' copies of the block tables, behind one interface.

vLLM has two model runners, V1 (CPUs) and V2 (GPUs, unless something in the configuration asks for
V1), which keep the pages of requests in different places.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, Protocol

from entropykv_vllm.pages.moves import Entries


class Tables(Protocol):
    """Where a model runner keeps the pages of its requests."""

    def rewrite(self, request_id: str, group: int, entries: Entries) -> None:
        """Put pages, 0 for holes, into a request's row before a step.

        Args:
            request_id: a request that the runner has been shown; unknown ones are left alone.
            group: number of the page group.
            entries: the new pages, by their places in the row.
        """

    def row(self, request_id: str, group: int) -> Sequence[int] | None:
        """The pages of a request in a page group, 0 for holes; None of an unknown request."""


def tables_of(runner: Any) -> Tables:
    """The tables of a model runner.

    Raises:
        RuntimeError: if it is neither of vLLM's.
    """
    if hasattr(runner, "block_tables") and hasattr(runner, "req_states"):
        return TablesV2(runner)
    if hasattr(runner, "input_batch") and hasattr(runner, "requests"):
        return TablesV1(runner)
    raise RuntimeError(
        f"EntropyKV does not know the model runner {type(runner).__name__}: "
        "turn eviction off with --kv-eviction none"
    )


class TablesV1:
    """A list a request, and a row of an array for those in the batch."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner

    def rewrite(self, request_id: str, group: int, entries: Entries) -> None:
        request = self.runner.requests.get(request_id)
        if request is None:
            return
        for entry, page in entries.items():
            request.block_ids[group][entry] = page
        row = self.runner.input_batch.req_id_to_index.get(request_id)
        if row is not None:
            table = self.runner.input_batch.block_table[group].block_table.np
            table[row, list(entries)] = list(entries.values())

    def row(self, request_id: str, group: int) -> Sequence[int] | None:
        request = self.runner.requests.get(request_id)
        return None if request is None else request.block_ids[group]


class TablesV2:
    """Rows on the device, which staged writes reach before the step."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner

    def rewrite(self, request_id: str, group: int, entries: Entries) -> None:
        row = self.runner.req_states.req_id_to_index.get(request_id)
        if row is None:
            return
        table = self.runner.block_tables.block_tables[group]
        for first, pages in _stretches(entries):
            table.stage_write(row, first, pages)

    def row(self, request_id: str, group: int) -> Sequence[int] | None:
        row = self.runner.req_states.req_id_to_index.get(request_id)
        if row is None:
            return None
        tables = self.runner.block_tables
        length = int(tables.num_blocks.np[group, row])
        return tables.block_tables[group].gpu[row, :length].tolist()


def _stretches(entries: Entries) -> Iterator[tuple[int, list[int]]]:
    """Entries that lie side by side: the first place, and the pages."""
    places = sorted(entries)
    for _, some in groupby(enumerate(places), key=lambda pair: pair[1] - pair[0]):
        stretch = [place for _, place in some]
        yield stretch[0], [entries[place] for place in stretch]
