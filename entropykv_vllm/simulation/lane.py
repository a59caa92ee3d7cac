# SPDX-License-Identifier: Apache-2.0
"""A replica in time: steps one after the other, and what is noted about them."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Protocol

from entropykv_vllm.simulation.job import Job
from entropykv_vllm.simulation.replica import Replica, Step


class Price(Protocol):
    """Says how long a step takes."""

    def seconds(self, step: Step) -> float:
        """Seconds of a step."""


@dataclass
class Notes:
    """What a replica did; a `_time` is multiplied with the seconds for which it was so.

    Attributes:
        steps: how many.
        busy: seconds of them all.
        tokens: of prompts and answers that were computed, those computed again included.
        answered: tokens of answers.
        preemptions: how often a request lost its pages.
        held_time, held_most: pages held.
        running_time, running_most: requests that ran.
        waiting_time, waiting_most: requests that waited.
        full_until: when the last step was planned that left requests waiting, and
        full_answered: tokens of answers until then.
    """

    steps: int = 0
    busy: float = 0.0
    tokens: int = 0
    answered: int = 0
    preemptions: int = 0
    held_time: float = 0.0
    held_most: int = 0
    running_time: float = 0.0
    running_most: int = 0
    waiting_time: float = 0.0
    waiting_most: int = 0
    full_until: float = 0.0
    full_answered: int = 0


class Lane:
    """The steps of one replica.

    Args:
        depth: how many steps may be planned and not ended: 2 if a step is planned while the one
            before it runs.
    """

    def __init__(self, replica: Replica, price: Price, depth: int) -> None:
        self.replica, self.price, self.depth = replica, price, depth
        self.notes = Notes()
        self._under_way: deque[tuple[float, Step]] = deque()
        self._ended = False

    @property
    def next_end(self) -> float:
        """When the oldest step under way ends; infinity if there is none."""
        return self._under_way[0][0] if self._under_way else math.inf

    def plan(self, now: float) -> None:
        """Plan as many steps as may be under way, once one has ended or if there is none."""
        if self._under_way and not self._ended:
            return
        self._ended = False
        while len(self._under_way) < self.depth and self.replica.load:
            step = self.replica.schedule()
            self.notes.preemptions += len(step.preempted)
            if step.tokens:
                self._start(step, now)
            elif not step.preempted:
                return  # all requests wait for the step under way

    def _start(self, step: Step, now: float) -> None:
        for job, hit in step.admitted:
            if job.started is None:
                job.started, job.found = now, hit
        seconds = self.price.seconds(step)
        start = max(now, self._under_way[-1][0]) if self._under_way else now
        self._under_way.append((start + seconds, step))
        self._note(step, now, seconds)

    def _note(self, step: Step, now: float, seconds: float) -> None:
        notes, replica = self.notes, self.replica
        held, running, waiting = replica.memory.held, len(replica.running), len(replica.waiting)
        notes.steps += 1
        notes.busy += seconds
        notes.tokens += sum(count for _, count in step.tokens)
        notes.held_time += held * seconds
        notes.running_time += running * seconds
        notes.waiting_time += waiting * seconds
        notes.held_most = max(notes.held_most, held)
        notes.running_most = max(notes.running_most, running)
        notes.waiting_most = max(notes.waiting_most, waiting)
        if waiting:
            notes.full_until, notes.full_answered = now, notes.answered

    def end(self) -> list[Job]:
        """End the oldest step; the requests that ended with it."""
        now, step = self._under_way.popleft()
        self._ended = True
        for job in step.answering:
            if job.answered is None:
                job.answered = now
        self.notes.answered += len(step.answering)
        ended = self.replica.finish(step)
        for job in ended:
            job.finished, job.names = now, ()
        return ended
