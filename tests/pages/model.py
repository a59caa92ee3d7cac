# SPDX-License-Identifier: Apache-2.0
"""A model of the workers' memory: each page holds a name that says what its bytes must be.

The name of a hot page is the prefix hash of its last token; that of a cold page is derived from
a prefix hash as in the prefix cache. Carrying out the planned moves on names shows whether the
real thing would read and write the right bytes at the right time.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace

from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request, RequestStatus, StreamingUpdate

from entropykv_vllm.pages.control import control, control_of
from entropykv_vllm.pages.hits import content_hash
from entropykv_vllm.pages.manager import Progress
from entropykv_vllm.pages.spec import Origin, TierSpec
from entropykv_vllm.plan.request import AS_SERVED, Control, request_plan
from entropykv_vllm.plan.schedule import (
    TierPlan,
    boundary,
    cold_pages,
    held_pages,
    hot_start,
    next_boundary,
    peak_pages,
)

MAX_LEN = 1 << 12


def make_manager(plans: list[TierPlan], pages: int, caching: bool) -> KVCacheManager:
    """vLLM's own KV cache manager over our tiers."""
    import torch

    init_none_hash(sha256)
    groups = [
        KVCacheGroupSpec(
            [f"layers.{i}"],
            TierSpec(
                block_size=plan.page,
                num_kv_heads=1,
                head_size=8,
                dtype=torch.float32,
                plan=plan,
                origin=Origin("0", "", "here"),
            ),
        )
        for i, plan in enumerate(plans)
    ]
    return KVCacheManager(
        KVCacheConfig(num_blocks=pages, kv_cache_tensors=[], kv_cache_groups=groups),
        max_model_len=MAX_LEN,
        scheduler_block_size=plans[0].page,
        hash_block_size=plans[0].page,
        enable_caching=caching,
    )


@dataclass
class Memory:
    """What each page holds, whichever group owns it at the time."""

    content: dict[int, bytes] = field(default_factory=dict)

    def carry_out(self, moves, names: dict[str, list[bytes]], plan_of) -> None:
        """Check that each move reads what the plan says it reads, then write its survivors."""
        for move in moves:
            plan, hashes = plan_of(move.request_id, move.group), names[move.request_id]
            planned, before = _planned(plan, move, hashes)
            assert move.kind == planned.kind
            for entry, page in zip(move.entries, move.src, strict=True):
                assert self.content.get(page) == before[entry], "a move reads the wrong page"
            for cold, page in zip(planned.dst, move.dst, strict=True):
                self.content[page] = content_hash(cold, hashes)


def _planned(plan: TierPlan, move, hashes):
    """The plan's move with these entries, and what each of its entries must hold before it."""
    from entropykv_vllm.plan.schedule import moves as planned_moves

    for at in range(plan.interval, len(hashes) * plan.page + 1, plan.interval):
        state = {c.entry: content_hash(c, hashes) for c in cold_pages(plan, at - plan.interval)}
        for planned in planned_moves(plan, at):
            before = {e: state.get(e, hashes[e]) for e in planned.src}
            if planned.src == move.entries and len(planned.dst) == len(move.dst):
                return planned, before
            for entry in planned.src:
                state.pop(entry, None)
            state.update({c.entry: content_hash(c, hashes) for c in planned.dst})
    raise AssertionError("a move that the plan does not have")


class Engine:
    """vLLM's KV cache manager driven as its scheduler drives it, over the model memory."""

    def __init__(
        self, plans: list[TierPlan], pages: int, caching: bool = True, choose_victim=None
    ) -> None:
        self.plans = plans
        self.choose_victim = choose_victim or (lambda running: running[-1])
        self.manager = make_manager(plans, pages, caching)
        self.pool = self.manager.block_pool
        self.tiers = self.manager.coordinator.single_type_managers
        self.requests: dict[str, Request] = {}
        for tier in self.tiers:
            tier.requests = self.requests
        self.memory = Memory()
        self.hasher = get_request_block_hasher(plans[0].page, sha256)
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.hits: dict[str, int] = {}
        self.preemptions = 0
        self._fresh: list[tuple[Request, int, int]] = []

    # -- what a user does ----------------------------------------------------------------------

    def add(self, request_id: str, tokens: list[int], asked: Control = AS_SERVED) -> Request:
        params = SamplingParams(max_tokens=10_000)
        request = Request(request_id, tokens, params, None, block_hasher=self.hasher)
        control(request, asked, self.plans[0].page)
        self.requests[request_id] = request
        self.waiting.append(request)
        return request

    def is_read(self, request: Request) -> bool:
        """Whether all but a request's last answer is in its pages."""
        return request.num_computed_tokens == request.num_tokens - 1 >= request.num_prompt_tokens

    def extend(self, request: Request, tokens: list[int]) -> None:
        """The prompt of a request that has its answer goes on: it waits, and keeps its pages."""
        self.running.remove(request)
        update = StreamingUpdate(None, tokens, 10_000, 0.0, request.sampling_params)
        scheduler = SimpleNamespace(hash_block_size=self.plans[0].page, log_stats=False)
        Scheduler._update_request_as_session(scheduler, request, update)
        self.waiting.insert(0, request)

    def abort(self, request: Request) -> None:
        for queue in (self.running, self.waiting):
            if request in queue:
                queue.remove(request)
        self.manager.free(request)
        del self.requests[request.request_id]

    def plans_of(self, request: Request) -> list[TierPlan]:
        """The plan of each tier for a request."""
        return [request_plan(plan, control_of(request)) for plan in self.plans]

    # -- a step --------------------------------------------------------------------------------

    def step(self, budget: int) -> None:
        """Schedule up to `budget` tokens, carry out the moves, write the new tokens, check all."""
        self.manager.new_step_starts()
        self._fresh = []
        preempted = False
        for request in list(self.running):
            if budget and request in self.running:
                taken, again = self._schedule_running(request, budget)
                budget -= taken
                preempted |= again
        while self.waiting and budget and not preempted:
            self.waiting.sort(key=lambda request: request.num_computed_tokens == 0)
            taken = self._admit(self.waiting[0], budget)
            if not taken:
                assert self.running or not self._fits(self.waiting[0]), "nobody runs, all wait"
                break
            budget -= taken
        self._execute()
        self.check()

    def _clip(self, request: Request, start: int, count: int) -> int:
        return min(count, next_boundary(self.plans[0].interval, start) - start)

    def _schedule_running(self, request: Request, budget: int) -> tuple[int, bool]:
        start = request.num_computed_tokens
        count = self._clip(request, start, min(budget, request.num_tokens - start))
        preempted = False
        while count and self.manager.allocate_slots(request, count) is None:
            victim = self.choose_victim(self.running)
            self._preempt(victim)
            preempted = True
            if victim is request:
                return 0, True
        if count:
            self._fresh.append((request, start, count))
        return count, preempted

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._fresh = [item for item in self._fresh if item[0] is not request]
        self.manager.free(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        self.waiting.insert(0, request)
        self.preemptions += 1

    def _admit(self, request: Request, budget: int) -> int:
        blocks, hit, start = None, 0, request.num_computed_tokens
        if not start:
            blocks, hit, _ = self.manager.get_computed_blocks(request)
            start = hit
        count = self._clip(request, start, min(budget, request.num_tokens - start))
        slots = self.manager.allocate_slots(
            request, count, hit, blocks, full_sequence_must_fit=True
        )
        if slots is None:
            return 0
        self.waiting.pop(0)
        self.running.append(request)
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = start
        self.hits[request.request_id] = hit
        self._fresh.append((request, start, count))
        return count

    def _fits(self, request: Request) -> bool:
        """Whether there are pages for what a request lacks, and to copy those that others have."""
        tables = [tier.req_to_blocks.get(request.request_id, ()) for tier in self.tiers]
        held = [block for table in tables for block in table if not block.is_null]
        plans = self.plans_of(request)
        lacking = sum(peak_pages(plan, request.num_tokens) for plan in plans) - len(held)
        shared = sum(block.ref_cnt > 1 for block in held)
        return lacking + shared <= self.pool.get_num_free_blocks()

    def _execute(self) -> None:
        moves = sorted((m for t in self.tiers for m in t.take_moves()), key=lambda m: m.order)
        names = {r.request_id: r.block_hashes for r in self._holding()}
        self.memory.carry_out(
            moves, names, lambda name, group: self.plans_of(self.requests[name])[group]
        )
        for request, start, count in self._fresh:
            self._write(request, start, count)
            request.num_computed_tokens = start + count
        for request, _, _ in self._fresh:
            if request.num_computed_tokens == request.num_tokens:
                request.append_output_token_ids(len(request.all_token_ids) % 7)

    def _write(self, request: Request, start: int, count: int) -> None:
        for group, plan in enumerate(self.plans):
            table = self.tiers[group].req_to_blocks[request.request_id]
            for entry in range(start // plan.page, -(-(start + count) // plan.page)):
                assert not table[entry].is_null, "a token is written to the null page"
                full = (entry + 1) * plan.page <= start + count
                name = request.block_hashes[entry] if full else b"partial"
                self.memory.content[table[entry].block_id] = name

    # -- what must always hold -----------------------------------------------------------------

    def check(self) -> None:
        self._check_ownership()
        for request in self._holding():
            for group, plan in enumerate(self.plans_of(request)):
                self._check_table(request, group, plan)

    def _holding(self) -> list[Request]:
        return self.running + [r for r in self.waiting if r.num_computed_tokens]

    def _check_ownership(self) -> None:
        owners: Counter[int] = Counter()
        for tier in self.tiers:
            for table in tier.req_to_blocks.values():
                owners.update(block.block_id for block in table if not block.is_null)
        free = {block.block_id for block in self.pool.free_block_queue.get_all_free_blocks()}
        assert not free & set(owners), "a page is both held and free"
        assert len(free) + len(owners) + 1 == self.pool.num_gpu_blocks, "a page leaked"
        for page, count in owners.items():
            assert self.pool.blocks[page].ref_cnt == count, "a page is owned twice"

    def _check_table(self, request: Request, group: int, plan: TierPlan) -> None:
        table = self.tiers[group].req_to_blocks[request.request_id]
        done = request.num_computed_tokens
        progress = self.tiers[group].progress.get(request.request_id, Progress())
        at = progress.at
        assert progress.cold == len(cold_pages(plan, at))
        assert progress.first_hot * plan.page == hot_start(plan, at)
        hashes = request.block_hashes
        expected = {c.entry: content_hash(c, hashes) for c in cold_pages(plan, at)}
        for entry in range(hot_start(plan, at) // plan.page, done // plan.page):
            expected[entry] = hashes[entry]
        for entry, block in enumerate(table[: done // plan.page]):
            if entry not in expected:
                assert block.is_null, "a dropped page is still held"
                continue
            held = self.memory.content.get(block.block_id)
            assert held == expected[entry], f"entry {entry} of tier {plan.name} holds other tokens"
        held = sum(not block.is_null for block in table)
        assert held <= peak_pages(plan, request.num_tokens), "more pages than the planned peak"
        assert held == held_pages(plan, at, len(table) * plan.page)
        assert boundary(plan, done) - at in (0, plan.interval)
