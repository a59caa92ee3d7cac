# SPDX-License-Identifier: Apache-2.0
"""Simulating a trace with each cache: the numbers, as JSON has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from entropykv_vllm.simulation.cost import Cost, Steps
from entropykv_vllm.simulation.fleet import Fleet
from entropykv_vllm.simulation.lane import Price
from entropykv_vllm.simulation.outcome import limit, outcome
from entropykv_vllm.simulation.replay import replay
from entropykv_vllm.simulation.router import ROUTERS
from entropykv_vllm.simulation.trace import Request


@dataclass(frozen=True)
class Times:
    """How long steps take: `cost.Cost`, the page's size aside; None to count steps.

    Attributes:
        card: which one these numbers stand for, None if all were given.
    """

    fixed: float
    rate: float
    bandwidth: float
    card: str | None

    def price(self, page_bytes: int) -> Cost:
        """The cost of steps with pages of this size."""
        return Cost(self.fixed, self.rate, self.bandwidth, page_bytes)


def simulate(
    fleets: Mapping[str, Fleet],
    requests: Sequence[Request],
    router: str,
    times: Times | None,
    progress: Callable[[int], None],
) -> dict[str, Any]:
    """Replay a trace with each cache.

    Args:
        fleets: by the name of the cache.
        router: a key of `ROUTERS`.
        times: None to count steps.
        progress: is told how many requests have ended since it was last told.
    """
    return {
        "requests": len(requests),
        "prompt_tokens": sum(request.prompt for request in requests),
        "answer_tokens": sum(request.output for request in requests),
        "seconds": requests[-1].arrival,
        "router": router,
        "times": asdict(times) if times else None,
        "caches": [
            _cache(name, fleet, requests, router, times, progress) for name, fleet in fleets.items()
        ],
    }


def replays(times: Times | None) -> int:
    """How often the trace is replayed with each cache."""
    return 2 if times else 1


def _cache(
    name: str,
    fleet: Fleet,
    requests: Sequence[Request],
    router: str,
    times: Times | None,
    progress: Callable[[int], None],
) -> dict[str, Any]:
    accepted = fleet.accepted(requests)
    progress(replays(times) * (len(requests) - len(accepted)))
    price: Price = times.price(fleet.plan.page_bytes) if times else Steps()

    def run(full: bool) -> Any:
        return replay(accepted, fleet.lanes(price), ROUTERS[router](), full, progress)

    found = {
        "cache": name,
        "page_bytes": fleet.plan.page_bytes,
        "pages": fleet.pages,
        "longest": fleet.longest,
        "refused": len(requests) - len(accepted),
    }
    if not accepted:
        return found
    full = run(True)
    rate, filled = limit(full)
    found |= {"limit": rate, "filled": filled, "full": outcome(full, fleet.pages)}
    if times:
        found["paced"] = outcome(run(False), fleet.pages)
    return found
