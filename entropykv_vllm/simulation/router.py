# SPDX-License-Identifier: Apache-2.0
"""Which replica gets a request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count

from entropykv_vllm.simulation.job import Job
from entropykv_vllm.simulation.replica import Replica

#: Returns the place of the replica that gets a request.
Route = Callable[[Job, Sequence[Replica]], int]


def in_turn() -> Route:
    """One replica after the other."""
    turns = count()
    return lambda job, replicas: next(turns) % len(replicas)


def least_loaded() -> Route:
    """The replica that has the fewest requests, the first of several."""
    return lambda job, replicas: min(range(len(replicas)), key=lambda i: replicas[i].load)


def by_prefix() -> Route:
    """The replica whose prefix cache has most of a prompt, and of those the least loaded.

    A replica that has as many requests more than the least loaded as run at a time gets none, so
    that one long prefix does not keep all others idle.
    """

    def route(job: Job, replicas: Sequence[Replica]) -> int:
        least = min(replica.load for replica in replicas)
        able = [i for i, one in enumerate(replicas) if one.load < least + one.requests]
        found = {i: replicas[i].memory.find(job.names, job.known)[1] for i in able}
        return min(able, key=lambda i: (-found[i], replicas[i].load))

    return route


#: By name; each makes a route of its own.
ROUTERS: dict[str, Callable[[], Route]] = {
    "round-robin": in_turn,
    "least-loaded": least_loaded,
    "prefix": by_prefix,
}
