# SPDX-License-Identifier: Apache-2.0
"""Replaying a trace: requests come, go to a replica, and are answered step by step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from entropykv_vllm.simulation.job import Job
from entropykv_vllm.simulation.lane import Lane
from entropykv_vllm.simulation.router import Route
from entropykv_vllm.simulation.trace import Request, page_names


@dataclass
class Replay:
    """What became of a trace.

    Attributes:
        jobs: its requests, as they ended.
        lanes: the replicas.
        seconds: until the last request ended.
    """

    jobs: list[Job]
    lanes: list[Lane]
    seconds: float = 0.0


def jobs_of(requests: Sequence[Request], page: int) -> Iterator[Job]:
    """Requests as replicas take them; names are made late, for they are many."""
    for number, request in enumerate(requests):
        names = page_names(request, number, page)
        yield Job(number, request.prompt, request.length, names, request.arrival)


def replay(
    requests: Sequence[Request],
    lanes: list[Lane],
    route: Route,
    full: bool,
    progress: Callable[[int], None],
) -> Replay:
    """Replay a trace to its end.

    Args:
        full: requests come whenever a replica has no more waiting than may run at a time, rather
            than at their own time.
        progress: is told how many requests have ended since it was last told.
    """
    result = Replay([], lanes)
    queue = _Queue(requests, lanes, route, full)
    now = 0.0
    while True:
        result.jobs += queue.send(now)
        for lane in lanes:
            lane.plan(now)
        ending = min(lanes, key=lambda lane: lane.next_end)
        now = min(ending.next_end, queue.next_arrival)
        if math.isinf(now):
            break
        if ending.next_end <= now:
            progress(len(ending.end()))
            result.seconds = now
    assert not any(lane.replica.load for lane in lanes), "requests are left that nothing moves"
    return result


class _Queue:
    """The requests that have not been sent yet."""

    def __init__(
        self, requests: Sequence[Request], lanes: Sequence[Lane], route: Route, full: bool
    ) -> None:
        self.replicas = [lane.replica for lane in lanes]
        self.route, self.full = route, full
        self.jobs = jobs_of(requests, self.replicas[0].memory.page)
        self.next = next(self.jobs, None)

    @property
    def next_arrival(self) -> float:
        """When the next request comes, if it has a time of its own; else infinity."""
        return math.inf if self.full or self.next is None else self.next.arrival

    def send(self, now: float) -> list[Job]:
        """Send the requests that come now to replicas."""
        sent = []
        while (job := self.next) is not None and self._comes(job, now):
            job.arrival = now if self.full else job.arrival
            self.replicas[self.route(job, self.replicas)].add(job)
            sent.append(job)
            self.next = next(self.jobs, None)
        return sent

    def _comes(self, job: Job, now: float) -> bool:
        if self.full:
            return any(len(one.waiting) <= one.requests for one in self.replicas)
        return job.arrival <= now
