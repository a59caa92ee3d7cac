# SPDX-License-Identifier: Apache-2.0
"""The last minutes of a server, a sample a second: pages by tier, the pool, prefix hits."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

#: Samples kept, at most one a second.
SECONDS = 600

#: Of a tier's counts: held now, or done since the last time.
HELD, DONE = ("hot", "cold", "holes"), ("freed", "tokens_evicted")


@dataclass
class Sample:
    """What was so at the end of a second, and what happened in it; all engines added up.

    `usage` is the share of the pool in use, `queries` and `hits` are tokens of prompts, `tiers` the
    counts of each.
    """

    second: int
    usage: float = 0.0
    running: int = 0
    waiting: int = 0
    queries: int = 0
    hits: int = 0
    preempted: int = 0
    tiers: dict[str, dict[str, int]] = field(default_factory=dict)


class History:
    """Fed after each step of an engine; the samples are in the order of time."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.samples: deque[Sample] = deque(maxlen=SECONDS)
        self._clock = clock
        # By engine: what its last step said.
        self._now: dict[int, tuple[float, int, int, Mapping[str, Mapping[str, int]]]] = {}

    def add(
        self, engine: int, stats: Any, tiers: Mapping[str, Mapping[str, int]], preempted: int
    ) -> None:
        """Take in vLLM's `SchedulerStats` after a step, and the counts of each tier."""
        sample = self._sample()
        waiting = stats.num_waiting_reqs + stats.num_skipped_waiting_reqs
        held = tiers or self._now.get(engine, (0.0, 0, 0, {}))[3]
        self._now[engine] = stats.kv_cache_usage, stats.num_running_reqs, waiting, held
        found = stats.prefix_cache_stats
        sample.queries += found.queries + found.preempted_queries
        sample.hits += found.hits + found.preempted_hits
        sample.preempted += preempted
        self._count(sample, tiers)
        self._add_up(sample)

    def _sample(self) -> Sample:
        """The sample of this second; a clock that is set back adds to the last one."""
        second = int(self._clock())
        if not self.samples or self.samples[-1].second < second:
            self.samples.append(Sample(second))
        return self.samples[-1]

    @staticmethod
    def _count(sample: Sample, tiers: Mapping[str, Mapping[str, int]]) -> None:
        for name, counts in tiers.items():
            numbers = sample.tiers.setdefault(name, dict.fromkeys((*HELD, *DONE), 0))
            for name_of in DONE:
                numbers[name_of] += counts[name_of]

    def _add_up(self, sample: Sample) -> None:
        engines = self._now.values()
        sample.usage = sum(usage for usage, *_ in engines) / len(engines)
        sample.running = sum(running for _, running, *_ in engines)
        sample.waiting = sum(waiting for _, _, waiting, _ in engines)
        for name, numbers in sample.tiers.items():
            for kind in HELD:
                numbers[kind] = sum(held.get(name, {}).get(kind, 0) for *_, held in engines)


#: Of this process, which has one server.
HISTORY = History()
