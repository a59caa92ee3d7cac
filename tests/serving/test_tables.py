# SPDX-License-Identifier: Apache-2.0
"""The rows of both of vLLM's model runners after moves, in vLLM's own tables and kernels."""

import itertools
import random
from types import SimpleNamespace

import pytest
import torch
from vllm.v1.worker.block_table import MultiGroupBlockTable

from entropykv_vllm.pages.moves import PageMove, rewritten_rows
from entropykv_vllm.serving.tables import tables_of
from entropykv_vllm.serving.worker import EvictionWorkerMixin

from .interpreter import v2_state

REQUESTS, WIDTH, PAGE, TOKENS = 4, 48, 16, 256
CPU = torch.device("cpu")

#: Of each request, the pages of each group.
Pages = dict[str, list[list[int]]]


@pytest.fixture(scope="module")
def modules():
    with pytest.MonkeyPatch.context() as patch:
        yield v2_state(patch)


class V1:
    """vLLM's V1 tables, kept as its runner keeps them."""

    def __init__(self, modules, groups: int) -> None:
        table = MultiGroupBlockTable(
            REQUESTS, TOKENS, False, CPU, [PAGE] * groups, [WIDTH] * groups
        )
        self.requests: dict = {}
        self.input_batch = SimpleNamespace(req_id_to_index={}, block_table=table)
        self.free = list(range(REQUESTS))

    def step(self, gone, new: Pages, more: Pages) -> None:
        batch = self.input_batch
        for name in gone:
            self.requests.pop(name)
            self.free.append(batch.req_id_to_index.pop(name))
        for name, pages in new.items():
            self.requests[name] = SimpleNamespace(block_ids=[list(some) for some in pages])
            row = batch.req_id_to_index.setdefault(name, self.free.pop())
            batch.block_table.add_row(pages, row)
        for name, pages in more.items():
            for held, fresh in zip(self.requests[name].block_ids, pages, strict=True):
                held.extend(fresh)
            batch.block_table.append_row(pages, batch.req_id_to_index[name])

    def rows(self) -> Pages:
        tables = self.input_batch.block_table
        tables.commit_block_table(REQUESTS)
        for name, row in self.input_batch.req_id_to_index.items():
            for group, pages in enumerate(self.requests[name].block_ids):
                assert (
                    tables[group].get_device_tensor(REQUESTS)[row, : len(pages)].tolist() == pages
                )
        return {name: request.block_ids for name, request in self.requests.items()}


class V2:
    """vLLM's V2 tables, kept as its runner keeps them, with interpreted kernels."""

    def __init__(self, modules, groups: int) -> None:
        states, tables = modules["states"].RequestState, modules["block_table"].BlockTables
        self.req_states = states(REQUESTS, WIDTH * PAGE, TOKENS, 0, 8, CPU)
        self.block_tables = tables([PAGE] * groups, REQUESTS, TOKENS, [WIDTH] * groups, CPU)

    def step(self, gone, new: Pages, more: Pages) -> None:
        for name in gone:
            self.req_states.remove_request(name)
        for name, pages in new.items():
            self.req_states.remove_request(name)
            self.req_states.add_request(name, 1, [0], 0, 1)
            self._append(name, pages, overwrite=True)
        for name, pages in more.items():
            self._append(name, pages, overwrite=False)
        self.block_tables.apply_staged_writes()

    def _append(self, name: str, pages: list[list[int]], overwrite: bool) -> None:
        row = self.req_states.req_id_to_index[name]
        self.block_tables.append_block_ids(row, tuple(pages), overwrite)

    def rows(self) -> Pages:
        names = list(self.req_states.req_id_to_index)
        rows = [self.req_states.req_id_to_index[name] for name in names]
        found = self.block_tables.gather_block_tables(torch.tensor(rows), len(rows))
        held = self.block_tables.num_blocks.np[:, rows]
        return {
            name: [
                table[i, :count].tolist() for table, count in zip(found, held[:, i], strict=True)
            ]
            for i, name in enumerate(names)
        }


@pytest.fixture(params=[V1, V2], ids=["V1", "V2"])
def kind(request):
    return request.param


@pytest.fixture(params=[1, 2], ids=["one group", "two groups"])
def groups(request) -> int:
    return request.param


@pytest.fixture
def runner(kind, groups, modules):
    return kind(modules, groups)


ORDER = itertools.count()


def move(name: str, group: int, held: list[int], entries, dst) -> PageMove:
    src = tuple(held[entry] for entry in entries)
    return PageMove(next(ORDER), group, name, tuple(entries), src, tuple(dst), 0)


def carry_out(runner, moves: list[PageMove], gone=(), new: Pages | None = None, more=None) -> Pages:
    """One step as a worker does it, and the rows that are left."""
    worker = SimpleNamespace(_tables=tables_of(runner))
    EvictionWorkerMixin._rewrite_rows(worker, moves, set(new or {}))
    runner.step(gone, new or {}, more or {})
    rows, tables = runner.rows(), tables_of(runner)
    for name, pages in rows.items():
        assert [list(tables.row(name, group)) for group in range(len(pages))] == pages
    assert tables.row("nobody", 0) is None
    return rows


def start(runner, groups: int, **rows: list[int]) -> None:
    """Requests whose rows are the same in all groups, but for a hundred more in each."""
    new = {
        name: [[page + 100 * g for page in row] for g in range(groups)]
        for name, row in rows.items()
    }
    carry_out(runner, [], new=new)


def test_a_collapse_leaves_survivors_and_holes(runner, groups):
    start(runner, groups, a=[1, 2, 3, 4, 5], b=[6, 7, 8, 9])
    last = groups - 1
    found = carry_out(runner, [move("a", last, [1, 2, 3, 4, 5], [0, 1, 2, 3], [40, 2])])
    assert found["a"][last] == [40, 2, 0, 0, 5 + 100 * last]
    assert found["b"][last] == [page + 100 * last for page in (6, 7, 8, 9)]


def test_a_collapse_and_a_merge_in_one_step_are_one_rewrite(runner, groups):
    """The merge has entries far apart, one of which the collapse has just written."""
    start(runner, groups, a=[1, 0, 0, 2, 3, 4, 5])
    moves = [
        move("a", 0, [1, 0, 0, 2, 3, 4, 5], [3, 4, 5], [40]),
        move("a", 0, [1, 0, 0, 40, 0, 0, 5], [0, 3], [41]),
    ]
    assert carry_out(runner, moves)["a"][0] == [41, 0, 0, 0, 0, 0, 5]


def test_pages_that_a_step_appends_come_behind_the_moved_ones(runner, groups):
    start(runner, groups, a=[1, 2, 3], b=[4, 5])
    more = {name: [[50 + g, 60 + g] for g in range(groups)] for name in "ab"}
    found = carry_out(runner, [move("a", 0, [1, 2, 3], [0, 1], [40])], more=more)
    assert found["a"][0] == [40, 0, 3, 50, 60]
    assert found["b"][0] == [4, 5, 50, 60]


def test_a_new_request_brings_its_row_whatever_one_of_its_name_had(runner, groups):
    start(runner, groups, a=[1, 2, 3], b=[4, 5])
    new = {"a": [[7, 8] for _ in range(groups)]}
    moves = [move("a", 0, [1, 2, 3], [0, 1], [40]), move("b", 0, [4, 5], [0, 1], [41])]
    found = carry_out(runner, moves, gone=["a"], new=new)
    assert found["a"] == [[7, 8]] * groups
    assert found["b"][0] == [41, 0]


def test_a_request_that_the_runner_does_not_know_changes_nothing(runner, groups):
    start(runner, groups, a=[1, 2, 3])
    before = runner.rows()
    assert carry_out(runner, [move("x", 0, [1, 2, 3], [0, 1], [40])]) == before


def test_a_request_that_left_the_batch_of_v1_is_rewritten_in_its_list(modules):
    runner = V1(modules, 1)
    start(runner, 1, a=[1, 2, 3])
    runner.input_batch.req_id_to_index.clear()
    tables_of(runner).rewrite("a", 0, {0: 9, 1: 0})
    assert runner.requests["a"].block_ids == [[9, 0, 3]]


def test_an_unknown_runner_is_refused():
    with pytest.raises(RuntimeError, match="does not know the model runner SimpleNamespace"):
        tables_of(SimpleNamespace())


@pytest.mark.parametrize("seed", range(3))
def test_any_steps_leave_the_rows_that_the_moves_say(runner, groups, seed):
    rng = random.Random(seed)
    pages, names = itertools.count(1), itertools.count()
    model: Pages = {}

    def fresh(most: int) -> list[list[int]]:
        return [[next(pages) for _ in range(rng.randint(1, most))] for _ in range(groups)]

    for _ in range(15):
        moves = [m for name in list(model) for m in _random_moves(rng, name, model[name], pages)]
        gone = [name for name in model if rng.random() < 0.1]
        moves = [m for m in moves if m.request_id not in gone]
        for (name, group), entries in rewritten_rows(moves).items():
            for entry, page in entries.items():
                model[name][group][entry] = page
        more = {name: fresh(2) for name in model if name not in gone and rng.random() < 0.7}
        for name in gone:
            del model[name]
        new = {f"r{next(names)}": fresh(12) for _ in range(REQUESTS - len(model))}
        more = {n: p for n, p in more.items() if len(model[n][0]) < WIDTH - 2 > len(model[n][-1])}
        for name, appended in more.items():
            for held, some in zip(model[name], appended, strict=True):
                held.extend(some)
        model |= {name: [list(some) for some in rows] for name, rows in new.items()}
        assert carry_out(runner, moves, gone, new, more) == model


def _random_moves(rng: random.Random, name: str, rows: list[list[int]], pages) -> list[PageMove]:
    """Some moves of a request, in order, each of which reads what the ones before left."""
    found = []
    for group, row in enumerate(rows):
        left = list(row)
        for _ in range(rng.randint(0, 3)):
            held = [entry for entry, page in enumerate(left) if page]
            if len(held) < 2:
                break
            entries = sorted(rng.sample(held, rng.randint(2, min(5, len(held)))))
            dst = [next(pages) for _ in range(rng.randint(0, len(entries) - 1))]
            found.append(move(name, group, left, entries, dst))
            for entry, page in found[-1].rewritten.items():
                left[entry] = page
    return found
