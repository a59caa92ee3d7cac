# SPDX-License-Identifier: Apache-2.0
"""How many replicas Ray Serve should run: enough that the pages which requests ask for fit."""

from __future__ import annotations

from typing import Any, Protocol

#: What a replica tells Ray, see `serving.metrics.demand`.
DEMAND = "entropykv_demand"


class Context(Protocol):
    """What Ray Serve tells a policy."""

    current_num_replicas: int
    aggregated_metrics: dict[str, dict[Any, float]] | None


class PagesAskedFor:
    """A policy for Ray Serve's ``autoscaling_config``.

    Args:
        target: the share of a replica's pages that requests shall ask for.
    """

    def __init__(self, target: float = 0.7) -> None:
        if not 0 < target <= 1:
            raise ValueError(f"target is a share of the pages, above 0 and up to 1: not {target}")
        self.target = target

    def __call__(self, context: Context) -> tuple[float, dict]:
        """The number of replicas that would meet the target, before Ray's bounds and delays.

        Replicas that have not told theirs yet count as those that have, on average.
        """
        told = ((context.aggregated_metrics or {}).get(DEMAND) or {}).values()
        if not told:
            return float(context.current_num_replicas), {}
        pools = sum(told) / len(told) * context.current_num_replicas
        return pools / self.target, {}
