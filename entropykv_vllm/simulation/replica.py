# SPDX-License-Identifier: Apache-2.0
"""vLLM's scheduler with ours on top: which requests get how many tokens in a step."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from entropykv_vllm.plan.schedule import next_boundary
from entropykv_vllm.simulation.job import Job
from entropykv_vllm.simulation.memory import Memory


@dataclass(slots=True)
class Step:
    """What was planned for one step.

    Attributes:
        tokens: the requests of the step in their order, and how many tokens of each are computed.
        answering: those of them that will have read all there is, and get a token more.
        admitted: those of them that were waiting, and the tokens that the prefix cache had.
        preempted: requests that lost their pages.
    """

    tokens: list[tuple[Job, int]] = field(default_factory=list)
    answering: list[Job] = field(default_factory=list)
    admitted: list[tuple[Job, int]] = field(default_factory=list)
    preempted: list[Job] = field(default_factory=list)


class Replica:
    """The requests of one server.

    Args:
        memory: its pages.
        step_tokens: vLLM's --max-num-batched-tokens.
        requests: vLLM's --max-num-seqs.
        interval: no step of a request crosses a multiple of it; None for vLLM alone.
        ahead: whether a step is planned while the one before it runs, as on GPUs.
    """

    def __init__(
        self,
        memory: Memory,
        step_tokens: int,
        requests: int,
        interval: int | None,
        ahead: bool = False,
    ) -> None:
        self.memory, self.ahead = memory, ahead
        self.step_tokens, self.requests, self.interval = step_tokens, requests, interval
        self.running: list[Job] = []
        self.waiting: deque[Job] = deque()

    @property
    def load(self) -> int:
        """Requests that run or wait."""
        return len(self.running) + len(self.waiting)

    def add(self, job: Job) -> None:
        """Let a request wait."""
        self.waiting.append(job)

    def schedule(self) -> Step:
        """Plan a step: running requests first, then waiting ones, as vLLM's `schedule` does."""
        step = Step()
        budget = self._schedule_running(step)
        if not step.preempted:
            self._schedule_waiting(step, budget)
        for job, count in step.tokens:
            job.computed += count
            job.in_flight += count
            if job.computed == job.known + job.awaited:
                job.awaited += 1
                step.answering.append(job)
        self.memory.written()
        return step

    def _schedule_running(self, step: Step) -> int:
        """Plan the tokens of running requests; the tokens that are left for others."""
        budget, i, running, memory = self.step_tokens, 0, self.running, self.memory
        while i < len(running) and budget > 0:
            job = running[i]
            count = self._next_tokens(job, budget)
            if count:
                if not memory.grow(job, count) and not self._make_room(job, count, step):
                    break
                step.tokens.append((job, count))
                budget -= count
            i += 1
        return budget

    def _next_tokens(self, job: Job, budget: int) -> int:
        """The tokens of a running request's next step, 0 if it must wait for those under way."""
        start = job.computed
        if job.awaited and start + 2 - job.awaited >= job.length:
            return 0
        count = min(job.known + job.awaited - start, budget)
        if self.interval is None:
            return count
        if job.in_flight and start % self.interval == 0:
            return 0
        return min(count, next_boundary(self.interval, start) - start)

    def _make_room(self, job: Job, count: int, step: Step) -> bool:
        """Give a request the pages of the last ones that run; False if it lost its own."""
        while True:
            victim = self.running.pop()
            self._preempt(victim)
            step.preempted.append(victim)
            if victim is job:
                return False
            if self.memory.grow(job, count):
                return True

    def _preempt(self, job: Job) -> None:
        self.memory.release(job)
        job.computed = job.awaited = 0
        job.stale = job.in_flight
        job.preemptions += 1
        self.waiting.appendleft(job)

    def _schedule_waiting(self, step: Step, budget: int) -> None:
        while self.waiting and budget > 0 and len(self.running) < self.requests:
            job = self.waiting[0]
            found, hit, job.junction = self.memory.find(job.names, job.known)
            count = min(job.known - hit, budget)
            if self.interval is not None:
                count = min(count, next_boundary(self.interval, hit) - hit)
            if not self.memory.admit(job, found, hit, count):
                return
            self.running.append(self.waiting.popleft())
            job.computed = hit
            step.tokens.append((job, count))
            step.admitted.append((job, hit))
            budget -= count

    def finish(self, step: Step) -> list[Job]:
        """End a step, so that requests get their tokens; those that end with it."""
        stale = {job for job, _ in step.tokens if job.stale}
        for job, count in step.tokens:
            job.in_flight -= count
        for job in stale:
            job.stale = job.in_flight
        ended = [job for job in step.answering if self._answer(job, job in stale)]
        if ended:
            gone = set(ended)
            self.running = [job for job in self.running if job not in gone]
            self.waiting = deque(job for job in self.waiting if job not in gone)
        return ended

    def _answer(self, job: Job, stale: bool) -> bool:
        """Give a request a token; whether it was the last, so that it let its pages go."""
        job.known += 1
        if not stale:
            job.awaited -= 1
            if self.ahead and (tokens := job.computed - job.awaited) >= job.filled:
                self.memory.name(job, tokens)
        if job.known < job.length:
            return False
        self.memory.release(job)
        return True
