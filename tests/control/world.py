# SPDX-License-Identifier: Apache-2.0
"""A case played on vLLM's scheduler, our page managers and a worker of names; all is checked."""

from __future__ import annotations

import pickle
import random
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass

from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, RequestStatus

from entropykv_vllm.config import request as wishes
from entropykv_vllm.pages.control import control_of
from entropykv_vllm.pages.manager import TierManager
from entropykv_vllm.plan.pool import Evicted, Pool, Sliding
from entropykv_vllm.plan.request import AS_SERVED, Control
from entropykv_vllm.plan.schedule import peak_pages
from entropykv_vllm.serving import clearing
from entropykv_vllm.serving.scheduler import MOVES

from ..pages.tiers import PAGE
from ..simulation.scheduled import Server, make_scheduler
from .case import STOP, Abort, Action, Ask, Case, Finish, More, Plan, Reset, Setup, answered, tokens
from .worker import Worker, WorkerInWaves

#: Plannings in a row in which nothing may happen while there is something to do.
IDLE = 3


@dataclass
class Step:
    """A planned step, as it travels to a worker, too.

    What its requests had asked for, and the pages that are free and not cached before and after.
    """

    planned: SchedulerOutput
    sent: bytes
    asked: dict[str, Control]
    lost_before: list[int]
    lost_after: list[int]


class _Noted(set):
    """Requests that are stuck, which are often not when it is asked for."""

    def __init__(self, seen: Counter[str]) -> None:
        super().__init__()
        self.seen = seen

    def add(self, name: str) -> None:
        self.seen["stuck"] += 1
        super().add(name)


class World:
    """A server, from what users do to what its attention reads."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        plan = _pool(setup)
        self.pages = setup.slack + plan.peak(setup.longest)
        self.scheduler = make_scheduler(_server(setup, plan, self.pages))
        self.scheduler.use_v2_model_runner = setup.v2
        manager = self.scheduler.kv_cache_manager
        self.pool, self.tables = manager.block_pool, manager.coordinator.single_type_managers
        self.worker = self._make_worker()
        self.hasher = get_request_block_hasher(PAGE, sha256)
        self.under_way: deque[Step] = deque()
        self.asked: dict[str, Ask] = {}
        self._asked: dict[str, Control] = {}
        self.lengths: dict[str, int] = {}
        self.seen: Counter[str] = Counter()
        self._arrivals = 0
        for tier in self.tables:
            if isinstance(tier, TierManager):
                tier._stuck = _Noted(self.seen)

    def _make_worker(self) -> Worker:
        setup = self.setup
        more = {"rng": random.Random(0)} if setup.waves else {}
        return (WorkerInWaves if setup.waves else Worker)(
            (*setup.tiers, *setup.windows),
            PAGE,
            clearing.cleared_groups(self.scheduler.kv_cache_config),
            self._answer,
            lambda name: self._asked[name],
            setup.v2,
            setup.seats,
            setup.longest,
            **more,
        )

    # -- what users do -------------------------------------------------------------------------

    def play(self, action: Action) -> None:
        """Do it, if it can be done: what names a request that is gone, or still there, is not."""
        match action:
            case Ask():
                self._ask(action)
            case More():
                self._more(action)
            case Abort():
                self.scheduler.finish_requests(action.name, RequestStatus.FINISHED_ABORTED)
            case Plan():
                self._plan(action.budget)
            case Finish():
                self._finish()
            case Reset():
                self._reset(action.running)

    def _ask(self, ask: Ask) -> None:
        # vLLM makes names unique, so none is used again while a step under way has it.
        flying = (step.planned.num_scheduled_tokens for step in self.under_way)
        if ask.name not in self.scheduler.requests and not any(ask.name in f for f in flying):
            self.asked[ask.name] = ask
            prompt = tokens(ask.prompt)
            self.lengths[ask.name] = len(prompt) + ask.answer
            self._add(ask, prompt, ask.answer)
            self.seen["wishes"] += control_of(self.scheduler.requests[ask.name]) != AS_SERVED

    def _more(self, more: More) -> None:
        """A session goes on, if it is one and is not too long then."""
        request, prompt = self.scheduler.requests.get(more.name), tokens(more.prompt)
        length = self.lengths.get(more.name, 0) + len(prompt) + more.answer
        if request is not None and request.resumable and length <= self.setup.longest:
            self.lengths[more.name] = length
            self._add(self.asked[more.name], prompt, more.answer)

    def _add(self, ask: Ask, prompt: list[int], answer: int) -> None:
        self._arrivals += 1
        stops = [STOP] if ask.stops else []
        request = Request(
            ask.name,
            prompt,
            SamplingParams(
                max_tokens=answer,
                ignore_eos=True,
                stop_token_ids=stops,
                extra_args=_wish(ask, len(prompt)),
            ),
            None,
            arrival_time=self._arrivals,
            priority=ask.priority if self.setup.priority else 0,
            block_hasher=self.hasher,
            resumable=ask.session,
        )
        self.scheduler.add_request(request)

    def _answer(self, name: str, prefix: int) -> int:
        ask = self.asked[name]
        token = answered(prefix, ask.salt)
        return STOP if ask.stops and (prefix >> 5) % 11 == 0 else token

    def _reset(self, running: bool) -> None:
        sessions = any(request.resumable for request in self.scheduler.requests.values())
        self.scheduler.reset_prefix_cache(running and not sessions)

    # -- steps ---------------------------------------------------------------------------------

    def _plan(self, budget: int) -> None:
        before = self._lost()
        self.scheduler.max_num_scheduled_tokens = min(budget, self.setup.budget)
        planned = self.scheduler.schedule()
        self._check_pool()
        self._check_tables(planned)
        self._note(planned)
        names = planned.num_scheduled_tokens
        asked = {name: control_of(self.scheduler.requests[name]) for name in names}
        step = Step(planned, pickle.dumps(planned), asked, before, self._lost())
        self.under_way.append(step)
        while len(self.under_way) > self.setup.depth:
            self._finish()

    def _finish(self) -> None:
        if not self.under_way:
            return
        step = self.under_way.popleft()
        self._asked = step.asked
        self.worker.lose(step.lost_before)
        answer = self.worker.step(pickle.loads(step.sent))
        self.worker.lose(step.lost_after)
        self.scheduler.update_from_output(step.planned, answer)
        self._check_pool()
        self._check_tokens(step.planned)

    def end(self) -> None:
        """All that was asked is answered, sessions are closed, and nothing is kept."""
        idle = 0
        self._close_sessions()
        while self.scheduler.requests:
            self._plan(self.setup.budget)
            counts = self.under_way[-1].planned.num_scheduled_tokens if self.under_way else True
            idle = 0 if counts else idle + 1
            if not counts:
                self._finish()
            self._close_sessions(stuck=idle > IDLE + self.setup.depth)
        self._plan(self.setup.budget)
        while self.under_way:
            self._finish()
        self._check_end()

    def _close_sessions(self, stuck: bool = False) -> None:
        """Close those that have their answers, and one more where two wait for each other's pages.

        And those that vLLM lost: where the answer of a preempted one ends with a step in flight, it
        is taken out of the queue into which it was just put.
        """
        here, sessions = (
            self.scheduler,
            [r for r in self.scheduler.requests.values() if r.resumable],
        )
        queued = {r.request_id for q in (here.waiting, here.kv_holding_waiting) for r in q}
        queued |= {r.request_id for r in here.running}
        waits = RequestStatus.WAITING_FOR_STREAMING_REQ
        ended = [r for r in sessions if r.status == waits or r.request_id not in queued]
        assert not stuck or len(sessions) > 1, "there is something to do, and nothing is done"
        names = [one.request_id for one in (sessions[-1:] if stuck else ended)]
        self.scheduler.finish_requests(names, RequestStatus.FINISHED_ABORTED)

    # -- what must always hold -----------------------------------------------------------------

    def _lost(self) -> list[int]:
        """Pages that are free, and that no prefix hit can find."""
        blocks = self.pool.blocks
        return [b.block_id for b in blocks if not b.ref_cnt and b.block_hash is None]

    def _rows(self) -> Iterator[list]:
        for table in self.tables:
            yield from table.req_to_blocks.values()

    def _check_pool(self) -> None:
        """Each page is free, or held as often as its count says; none is lost."""
        held = Counter(b.block_id for row in self._rows() for b in row if not b.is_null)
        free = [block.block_id for block in self.pool.free_block_queue.get_all_free_blocks()]
        assert len(free) == self.pool.get_num_free_blocks() == len(set(free))
        assert not held.keys() & set(free), "a page is both held and free"
        assert len(free) + len(held) == self.pages, "a page leaked"
        for page, count in held.items():
            assert self.pool.blocks[page].ref_cnt == count, "a page is counted wrong"

    def _check_tables(self, planned) -> None:
        """No more is held than the peak; a page that is not full yet is its request's alone."""
        for table in self.tables:
            for name, row in table.req_to_blocks.items():
                request = self.scheduler.requests[name]
                if isinstance(table, TierManager):
                    held = sum(not block.is_null for block in row)
                    most = peak_pages(table.plan_of(name), len(row) * PAGE)
                    assert held <= most, "more pages than the planned peak"
                # Full pages may have readers in the very step that writes them.
                if name in planned.num_scheduled_tokens and request.num_computed_tokens % PAGE:
                    last = row[request.num_computed_tokens // PAGE]
                    assert last.ref_cnt == 1, "a page that is still written has two owners"

    def _check_tokens(self, planned) -> None:
        for name in planned.num_scheduled_tokens:
            request, read = self.scheduler.requests.get(name), self.worker.requests.get(name)
            if request is not None and read is not None and not request.resumable:
                known = request.num_tokens
                assert list(request.all_token_ids) == read.tokens[:known], "tokens differ"

    def _check_end(self) -> None:
        assert self.pool.get_num_free_blocks() == self.pages, "pages leaked"
        for tier in self.tables:
            if isinstance(tier, TierManager):
                kept = [tier.progress, tier._whole, tier._stuck, tier._unhashed, tier._unwritten]
                kept += [tier._moves, tier.req_to_blocks, tier.num_cached_block]
                assert not any(kept), "something of a request is kept that is gone"
        assert not self.worker.requests, "the worker keeps a request that is gone"

    def _note(self, planned) -> None:
        """What happened, so that a test can say that it did."""
        self.seen["steps"] += 1
        self.seen["tokens"] += planned.total_num_scheduled_tokens
        self.seen["preempted"] += len(planned.preempted_req_ids or ())
        for new in planned.scheduled_new_reqs:
            self.seen["hits"] += new.num_computed_tokens > 0
        flying = {name for step in self.under_way for name in step.planned.num_scheduled_tokens}
        for move in getattr(planned, MOVES):
            self.seen[move.kind] += 1
            self.seen["beside others in flight"] += bool(flying)
            assert move.request_id not in flying, "pages are moved under a step in flight"
            gone = planned.preempted_req_ids or ()
            assert move.request_id not in gone, "a move of a request that was preempted"
            self.seen["copied"] += bool(move.dst) and move.dst[0] != move.src[0]


def play(case: Case) -> Counter[str]:
    """Play a case from its start to its end.

    Returns:
        How often what happened.

    Raises:
        AssertionError: and whatever else, if something is wrong.
    """
    world = World(case.setup)
    for action in case.actions:
        world.play(action)
    world.end()
    return world.seen


def _pool(setup: Setup) -> Pool:
    in_flight = setup.budget * (1 + max(setup.depth, setup.ahead))
    windows = (Sliding(PAGE, window, in_flight) for window in setup.windows)
    return Pool(1, (*map(Evicted, setup.tiers), *windows))


def _server(setup: Setup, plan: Pool, pages: int) -> Server:
    return Server(
        plan,
        pages,
        setup.budget,
        setup.seats,
        setup.tiers[0].interval,
        setup.caching,
        setup.ahead,
        longest=setup.longest,
        priority=setup.priority,
    )


def _wish(ask: Ask, tokens: int) -> dict[str, object]:
    """What a request asks for, as it is said to a server, of a prompt of so many tokens."""
    spans = [(first, min(end, tokens)) for first, end in ask.protect if first < tokens]
    said = {
        wishes.EVICTION: "none" if ask.off else None,
        wishes.KEEP: ask.keep,
        wishes.PROTECT: [f"{first}:{end}" for first, end in spans] or None,
    }
    return {key: value for key, value in said.items() if value is not None}
