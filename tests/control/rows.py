# SPDX-License-Identifier: Apache-2.0
"""The rows of vLLM's two model runners, kept as they keep them, without torch.

`tests/serving/test_tables.py` has the same over vLLM's own tables and kernels.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

#: Pages in each group's row of a request.
Rows = list[list[int]]


class RowsV1:
    """A list a request, and a row of an array for those in the batch."""

    def __init__(self, groups: int, seats: int, width: int) -> None:
        self.requests: dict[str, SimpleNamespace] = {}
        arrays = [np.zeros((seats, width), np.int32) for _ in range(groups)]
        tables = [SimpleNamespace(block_table=SimpleNamespace(np=array)) for array in arrays]
        self.input_batch = SimpleNamespace(req_id_to_index={}, block_table=tables)
        self._arrays, self._free = arrays, list(range(seats))

    def known(self, name: str) -> Rows | None:
        request = self.requests.get(name)
        return None if request is None else request.block_ids

    def update(self, output) -> None:
        """What the runner does with a step before it runs it."""
        cached = output.scheduled_cached_reqs
        for name in output.finished_req_ids:
            self.requests.pop(name, None)
            self._leave(name)
        staying = output.num_scheduled_tokens.keys() - cached.resumed_req_ids
        for name in self.input_batch.req_id_to_index.keys() - staying:
            self._leave(name)
        for new in output.scheduled_new_reqs:
            self._leave(new.req_id)
            self.requests[new.req_id] = SimpleNamespace(block_ids=[*map(list, new.block_ids)])
            self._enter(new.req_id)
        for name, pages in zip(cached.req_ids, cached.new_block_ids, strict=True):
            self._go_on(name, pages, name in cached.resumed_req_ids)

    def _go_on(self, name: str, pages, resumed: bool) -> None:
        request, row = self.requests[name], self.input_batch.req_id_to_index.get(name)
        if resumed:
            assert row is None
            request.block_ids = [*map(list, pages)]
        lengths = [len(held) for held in request.block_ids]
        for held, fresh in zip(
            request.block_ids, () if resumed or not pages else pages, strict=False
        ):
            held.extend(fresh)
        if row is None:
            self._enter(name)
            return
        for array, held, length in zip(self._arrays, request.block_ids, lengths, strict=True):
            array[row, length : len(held)] = held[length:]

    def _enter(self, name: str) -> None:
        row = self.input_batch.req_id_to_index[name] = self._free.pop()
        for array, held in zip(self._arrays, self.requests[name].block_ids, strict=True):
            array[row, : len(held)] = held

    def _leave(self, name: str) -> None:
        row = self.input_batch.req_id_to_index.pop(name, None)
        if row is not None:
            self._free.append(row)

    def read(self, name: str, group: int) -> np.ndarray:
        """The row that attention reads, with what is left over from others behind it."""
        return self._arrays[group][self.input_batch.req_id_to_index[name]]


class RowsV2:
    """Rows that staged writes reach at once, in no order, before the step."""

    def __init__(self, groups: int, seats: int, width: int) -> None:
        self.req_states = SimpleNamespace(req_id_to_index={})
        self.block_tables = SimpleNamespace(
            block_tables=[_Staged(seats, width) for _ in range(groups)]
        )
        self._lengths: dict[str, list[int]] = {}
        self._free = list(range(seats))

    def known(self, name: str) -> Rows | None:
        if name not in self._lengths:
            return None
        lengths = zip(range(len(self._lengths[name])), self._lengths[name], strict=True)
        return [self.read(name, group)[:length].tolist() for group, length in lengths]

    def update(self, output) -> None:
        """What the runner does with a step before it runs it."""
        for name in sorted(output.finished_req_ids | (output.preempted_req_ids or set())):
            self._remove(name)
        for new in output.scheduled_new_reqs:
            self._remove(new.req_id)
            self.req_states.req_id_to_index[new.req_id] = self._free.pop()
            self._lengths[new.req_id] = [0] * len(new.block_ids)
            self._append(new.req_id, new.block_ids)
        cached = output.scheduled_cached_reqs
        for name, pages in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if pages is not None:
                self._append(name, pages)
        for table in self.block_tables.block_tables:
            table.apply()

    def _append(self, name: str, pages) -> None:
        row, lengths = self.req_states.req_id_to_index[name], self._lengths[name]
        for group, fresh in enumerate(pages):
            self.block_tables.block_tables[group].stage_write(row, lengths[group], fresh)
            lengths[group] += len(fresh)

    def _remove(self, name: str) -> None:
        row = self.req_states.req_id_to_index.pop(name, None)
        if row is not None:
            self._lengths.pop(name)
            self._free.append(row)

    def read(self, name: str, group: int) -> np.ndarray:
        """The row that attention reads, with what is left over from others behind it."""
        table = self.block_tables.block_tables[group]
        return table.array[self.req_states.req_id_to_index[name]]


class _Staged:
    """One group's rows, and the writes that wait."""

    def __init__(self, seats: int, width: int) -> None:
        self.array = np.zeros((seats, width), np.int32)
        self._writes: dict[tuple[int, int], int] = {}

    def stage_write(self, row: int, first: int, pages) -> None:
        for place, page in enumerate(pages, first):
            assert (row, place) not in self._writes, "two staged writes meet"
            self._writes[row, place] = page

    def apply(self) -> None:
        for (row, place), page in self._writes.items():
            self.array[row, place] = page
        self._writes.clear()
