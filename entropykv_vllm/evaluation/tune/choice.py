# SPDX-License-Identifier: Apache-2.0
"""Which settings are best, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from entropykv_vllm.evaluation import scoring, table
from entropykv_vllm.evaluation.calibration.run import Summary
from entropykv_vllm.evaluation.tune.race import Standing

HEADER = ["settings", "held %", "times smaller", "right % (95 %)", "KL"]


def best(found: Sequence[Summary], target: float) -> Summary | None:
    """Return what holds least of all that reach the target; the first is the full cache."""
    goal = target * found[0].right
    enough = [one for one in found[1:] if one.right >= goal - 1e-9]
    return min(enough, key=lambda one: one.held, default=None)


def interval(one: Summary, texts: int) -> list[float]:
    """Return the share of right answers with its 95 % interval."""
    return [one.right, *scoring.wilson(round(one.right * texts), texts)]


def rows(found: Sequence[Summary], texts: int) -> list[list[str]]:
    """Return the rows of the table, what holds least first."""
    return [
        [
            one.cell.name,
            f"{100 * one.held:.1f}",
            f"{1 / one.held:.1f}",
            table.interval(interval(one, texts)),
            f"{one.kl:.2g}",
        ]
        for one in sorted(found, key=lambda one: one.held)
    ]


def report(left: Sequence[Summary], winner: Summary | None, given_up: Sequence[Standing]) -> Any:
    """Return all of it as JSON has it, what holds least first."""
    return {
        "settings": [_numbers(one) for one in sorted(left, key=lambda one: one.held)],
        "given up": [
            {**_numbers(one.mean()), "texts": one.texts}
            for one in sorted(given_up, key=lambda one: one.held)
        ],
        "best": None if winner is None else winner.cell.name,
    }


def _numbers(one: Summary) -> dict[str, Any]:
    return {
        "name": one.cell.name,
        "settings": {"policy": one.cell.policy, **one.cell.eviction},
        "held": one.held,
        "right": one.right,
        "nll": one.nll,
        "kl": one.kl,
    }
