# SPDX-License-Identifier: Apache-2.0
"""A request on its way through a replica."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from entropykv_vllm.simulation.table import Row


@dataclass(slots=True, eq=False)
class Job:
    """A request; all counts are in tokens.

    Attributes:
        number: its place in the trace.
        prompt: the length of its prompt.
        length: that of its prompt and its answer.
        names: of the content of each page that its tokens fill.
        arrival: when it came, in seconds.
        known: prompt and answer so far.
        computed: whose keys and values are written, or will be by the steps under way.
        in_flight: of the steps under way.
        awaited: of the answer, from the steps under way.
        stale: of steps under way when it was preempted.
        rows: what it holds in each table; none while it waits.
        held: pages in all of them.
        filled: with how many tokens its next page is full.
        steady: whether its last step was one of decoding.
        junction: where another request's prompt goes on otherwise, as some tables found; else 0.
        found: how many tokens of its prompt the prefix cache had, at first.
        preemptions: how often it lost its pages.
        started, answered, finished: when it was first scheduled, its first token came, and its
            last; in seconds, None before.
    """

    number: int
    prompt: int
    length: int
    names: Sequence[Hashable]
    arrival: float = 0.0
    known: int = 0
    computed: int = 0
    in_flight: int = 0
    awaited: int = 0
    stale: int = 0
    rows: list[Row] = field(default_factory=list)
    held: int = 0
    filled: int = 0
    steady: bool = False
    junction: int = 0
    found: int = 0
    preemptions: int = 0
    started: float | None = None
    answered: float | None = None
    finished: float | None = None

    def __post_init__(self) -> None:
        self.known = self.prompt
