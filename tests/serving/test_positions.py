# SPDX-License-Identifier: Apache-2.0
"""Positions beside pages: after real moves each slot's number is its token's position."""

import numpy as np
import pytest
import torch

from entropykv_vllm.config.settings import load
from entropykv_vllm.kernels import ops
from entropykv_vllm.kernels.formats import cold_capacity, read_cold
from entropykv_vllm.kernels.moves import Batch, carry_out
from entropykv_vllm.plan import schedule
from entropykv_vllm.plan.request import AS_SERVED
from entropykv_vllm.plan.schedule import TierPlan, cold_count, hot_start
from entropykv_vllm.serving import positions
from entropykv_vllm.serving.view import GroupView, View

from ..page.steps import step

HEADS, SIZE, PAGE, TOKENS = 2, 64, 32, 2000
#: A shuffled place in the pool for each table entry, and room for others before it.
PAGES = (torch.randperm(-(-TOKENS // PAGE), generator=torch.manual_seed(5)) + 7).tolist()

COLD = cold_capacity(torch.zeros(1, HEADS, PAGE, 2 * SIZE, dtype=torch.bfloat16), 4)
PLANS = {
    "16 bits": TierPlan("t", PAGE, PAGE, 128, 256, 64, 0.4, 4),
    "merged": TierPlan("t", PAGE, PAGE, 32, 256, 64, 0.25, 4),
    "4 bits": TierPlan("t", PAGE, COLD, 2 * COLD, 256, 64, 0.5, 4, bits=4),
    "capped": TierPlan("t", PAGE, PAGE, 128, 256, 64, 1.0, 4, cap=256),
}


class Worker:
    """One layer and one request, whose pages are written and moved as in a server."""

    def __init__(self, plan: TierPlan) -> None:
        self.plan = plan
        torch.manual_seed(0)
        self.keys = torch.randn(TOKENS, HEADS, SIZE).bfloat16().float()
        self.values = torch.randn(TOKENS, HEADS, SIZE).bfloat16().float()
        self.cache = torch.zeros(len(PAGES) + 7, HEADS, PAGE, 2 * SIZE, dtype=torch.bfloat16)
        self.table = positions.Tables([plan]).of(self.cache)
        self.table.fill_(1e6)
        self.row = list(PAGES)
        group = GroupView(plan, [0], HEADS, [self.table])
        self.view = View({0: group}, lambda *_: self.row, lambda _: AS_SERVED)

    def read(self, tokens: int) -> None:
        """Read tokens an interval at a time, but the last ones one at a time."""
        start, alone = 0, tokens - 40
        while start < tokens:
            self.move(start)
            end = start + 1
            if start < alone:
                end = min(alone, schedule.next_boundary(self.plan.interval, start))
            at = torch.arange(start, end)
            slots = torch.tensor(PAGES)[at // PAGE] * PAGE + at % PAGE
            ops.write(self.keys[at], self.values[at], self.cache, slots)
            said = {"new": {"r": (tokens, 0, end)}} if start == 0 else {}
            self.view.note(step(**(said or {"more": {"r": (start, end - start)}})))
            start = end

    def move(self, at: int) -> None:
        if at == 0 or at % self.plan.interval:
            return
        settings = load("entropykv", {"preset": "balanced"})
        for move in schedule.moves(self.plan, at):
            entries = [page.entry for page in move.dst]
            src = torch.tensor([[self.row[entry] for entry in move.src]])
            dst = torch.tensor([[self.row[entry] for entry in entries]])
            if entries:
                batch = Batch(move.kind, self.plan.bits, src, dst, torch.tensor([move.sinks]))
                carry_out(self.cache, batch, settings, self.table)
            for entry in set(move.src) - set(entries):
                self.row[entry] = 0


@pytest.fixture(params=PLANS)
def worker(request) -> Worker:
    made = Worker(PLANS[request.param])
    made.read(1500)
    return made


def cold_pages(worker: Worker) -> tuple[torch.Tensor, int]:
    old = hot_start(worker.plan, 1499 // worker.plan.interval * worker.plan.interval)
    held = [page for page in worker.row[: old // PAGE] if page]
    return torch.tensor(held), old


def test_each_head_holds_as_many_different_old_tokens_as_the_plan_says(worker):
    pages, old = cold_pages(worker)
    at = 1499 // worker.plan.interval * worker.plan.interval
    numbers = worker.table[pages][..., : worker.plan.cold].transpose(0, 1).flatten(1).long()
    assert len(pages) == cold_count(worker.plan, at) > 0
    for head in numbers.tolist():
        assert len(set(head)) == len(head) == len(pages) * worker.plan.cold
        assert set(head) <= set(range(old))
        assert {0, 1, 2, 3} <= set(head), "sinks stay"
    assert numbers[0].tolist() != numbers[1].tolist(), "heads choose for themselves"


def test_the_numbers_are_those_of_the_keys_beside_them(worker):
    pages, _ = cold_pages(worker)
    keys, _ = read_cold(worker.cache, pages, worker.plan.bits)
    keys = keys.transpose(0, 1).flatten(1, 2).float()
    numbers = worker.table[pages][..., : worker.plan.cold].transpose(0, 1).flatten(1).long()
    for head, where in enumerate(numbers):
        near = torch.cdist(keys[head], worker.keys[:, head]).argmin(1)
        assert torch.equal(near, where)


def test_the_workers_answer_counts_them(worker):
    pages, old = cold_pages(worker)
    group = worker.view.look({"r": [0, -1]})["held"]["r"]["groups"][0]
    counts = np.frombuffer(group["counts"], np.uint16)
    assert (group["hot"], len(counts), group["pairs"]) == (old, old, HEADS)
    assert counts.sum() == len(pages) * worker.plan.cold * HEADS
    assert counts[:4].tolist() == [HEADS] * 4
    per_band = [counts[int(a) : int(b)].mean() / HEADS for a, b, _ in group["bands"]]
    assert per_band == pytest.approx([share for *_, share in group["bands"]])


def test_layers_in_the_same_memory_share_a_table():
    cache = torch.zeros(3, HEADS, PAGE, 2 * SIZE)
    tables = positions.Tables(PLANS.values())
    assert tables.of(cache) is tables.of(cache.view(3, HEADS, PAGE, 2 * SIZE))
    assert tables.of(cache).shape == (3, HEADS, max(COLD, PAGE))
    assert tables.of(torch.zeros_like(cache)) is not tables.of(cache)


def test_the_plans_above_have_moves_of_every_kind():
    kinds = {move.kind for plan in PLANS.values() for move in schedule.moves(plan, 1024)}
    assert kinds == {"collapse", "merge", "drop"}
