# SPDX-License-Identifier: Apache-2.0
"""The replicas of one cache: what each has, and which requests it refuses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from entropykv_vllm.plan.pool import Evicted, Pool
from entropykv_vllm.simulation.lane import Lane, Price
from entropykv_vllm.simulation.memory import Memory
from entropykv_vllm.simulation.replica import Replica
from entropykv_vllm.simulation.trace import Request


@dataclass(frozen=True)
class Fleet:
    """Equal replicas.

    Attributes:
        plan: the tables of a request.
        pages: of each replica, vLLM's null page not counted.
        longest: vLLM's --max-model-len.
        replicas: how many.
        step_tokens: vLLM's --max-num-batched-tokens.
        requests: vLLM's --max-num-seqs.
        caching: whether there is a prefix cache.
        ahead: whether a step is planned while the one before it runs.
    """

    plan: Pool
    pages: int
    longest: int
    replicas: int
    step_tokens: int
    requests: int
    caching: bool
    ahead: bool

    @property
    def depth(self) -> int:
        """Steps that may be planned and not ended."""
        return 2 if self.ahead else 1

    @property
    def interval(self) -> int | None:
        """Where steps end: at multiples of so many tokens; None for vLLM alone."""
        tiers = (table.plan for table in self.plan.tables if isinstance(table, Evicted))
        return next((tier.interval for tier in tiers), None)

    def accepted(self, requests: Sequence[Request]) -> list[Request]:
        """The requests that a server with this memory does not refuse for their length."""
        return [request for request in requests if request.length <= self.longest]

    def lanes(self, price: Price) -> list[Lane]:
        """Replicas with empty caches."""
        return [Lane(self._replica(), price, self.depth) for _ in range(self.replicas)]

    def _replica(self) -> Replica:
        in_flight = self.depth * self.step_tokens
        memory = Memory(self.plan, self.pages, self.caching, in_flight, self.ahead)
        return Replica(memory, self.step_tokens, self.requests, self.interval, self.ahead)
