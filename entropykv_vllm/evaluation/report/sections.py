# SPDX-License-Identifier: Apache-2.0
"""What is measured: cells that answer the same prompts, or read on in the same texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from entropykv_vllm.evaluation import engines
from entropykv_vllm.evaluation.calibration import allocation
from entropykv_vllm.evaluation.offline.cell import Cell
from entropykv_vllm.evaluation.tasks import TASKS
from entropykv_vllm.model.fetch import NAME

POLICIES = (
    "entropykv",
    "norm",
    "knorm",
    "keydiff",
    "h2o",
    "snapkv",
    "tova",
    "sink",
    "window",
    "random",
)
KEEPS = (0.75, 0.5, 0.25, 0.1)
BITS = (16, 8, 4)
#: What the best of the matrix are compared at elsewhere.
FEWER = (0.5, 0.25, 0.1)

FULL = Cell("full cache", "none")


@dataclass(frozen=True)
class Section:
    """Cells and the prompts that they answer; `task` "text" means to read on in ordinary text."""

    name: str
    cells: Sequence[Cell]
    task: str = "needle"
    model: str = NAME
    tokens: int = 2048
    prompts: int = 40
    aware: bool = False
    dtype: str = "bfloat16"
    seed: int = 0
    through_engine: bool = False  # the prompts are those of `entropykv needle`

    @property
    def counts_context(self) -> bool:
        """Whether the question comes on top of `tokens`."""
        return self.task in TASKS and not self.aware and not self.through_engine

    def spec(self) -> dict[str, Any]:
        """What decides the results."""
        cells = [[c.name, c.policy, dict(c.eviction), c.score] for c in self.cells]
        return {
            "task": self.task,
            "model": self.model,
            "tokens": self.tokens,
            "prompts": self.prompts,
            "aware": self.aware,
            "dtype": self.dtype,
            "seed": self.seed,
            **({"prompts of": "needle"} if self.through_engine else {}),
            **({"counted": "context"} if self.counts_context else {}),
            "cells": cells,
        }


def cell(policy: str, keep: float, bits: int, tokens: int, name: str = "", **more: Any) -> Cell:
    """One policy at one keep ratio and number of bits, named `policy keep bits` by itself."""
    settings = engines.eviction(policy, keep, tokens, {**more, "bits": bits})
    return Cell(name or f"{policy} {keep:g} {bits}", policy, settings)


def kept(tokens: int, bits: Sequence[int] = BITS) -> list[Cell]:
    """The full cache, and that of everything in fewer bits."""
    return [FULL, *(cell("entropykv", 1.0, b, tokens, f"all 1 {b}") for b in bits if b < 16)]


def grid(
    policies: Sequence[str], keeps: Sequence[float], bits: Sequence[int], tokens: int
) -> list[Cell]:
    """Every policy at every keep ratio and number of bits; windows are in 16 bits alone."""
    return kept(tokens, bits) + [
        cell(policy, keep, b, tokens)
        for policy in policies
        for keep in keeps
        for b in (bits if policy not in engines.WINDOW_ONLY else (16,))
    ]


def shapes(tokens: int, order: Sequence[int]) -> list[Cell]:
    """Ways to spread the same bytes over the layers, and to choose tokens within one.

    `order` are the layers, the most sensitive first.
    """
    found = [FULL]
    for keep in (0.5, 0.25):
        for policy in ("entropykv", "keydiff"):
            ways = {**SHAPES, **_calibrated(order, keep), **CHOICES}
            made = [
                cell(policy, keep, 16, tokens, f"{policy} {keep:g} {name}", **more)
                for name, more in ways.items()
            ]
            back = Cell(
                f"{policy} {keep:g} keys turned back",
                policy,
                made[0].eviction,
                f"{policy}-unrotated",
            )
            found += [*made, back]
    return found


def _calibrated(order: Sequence[int], keep: float) -> dict[str, dict[str, Any]]:
    """The most sensitive layers whole, paid for by the others."""
    tried = {size: allocation.tiers(order, size, keep) for size in (3, 5)}
    return {f"calibrated, {n} layers whole": {"tiers": t} for n, t in tried.items() if t}


#: Mean keep ratios on the way to a thirtieth of the memory.
LITTLE = (0.25, 0.2, 0.15, 0.1, 0.07, 0.05)
#: Keep ratio, number of sensitive layers, what those keep.
LEAST = ((0.05, 3, 0.35), (0.04, 2, 0.35), (0.035, 3, 0.25), (0.03, 2, 0.25), (0.03, 0, 0.0))
#: How many sensitive layers keep how much.
TOPS = ((0, 0.0), (3, 1.0), (3, 0.5), (5, 0.5), (10, 0.5))


def little(tokens: int, order: Sequence[int]) -> list[Cell]:
    """Calibrated and uniform tiers in 4 bits, with short windows, at ever less memory."""
    more = {"window": 64, "interval": 128}
    ways = [(keep, size, top) for keep in LITTLE for size, top in TOPS]
    return [
        FULL,
        cell("entropykv", 1.0, 4, tokens, "all 1 4", **more),
        *_tiered(tokens, order, ways, more),
    ]


def least(tokens: int, order: Sequence[int]) -> list[Cell]:
    """As little as pages of these sizes can hold."""
    return [FULL, *_tiered(tokens, order, LEAST, {"window": 32, "interval": 64})]


def _tiered(
    tokens: int,
    order: Sequence[int],
    ways: Sequence[tuple[float, int, float]],
    more: Mapping[str, Any],
) -> list[Cell]:
    found = []
    for keep, size, top in ways:
        if tiers := allocation.tiers(order, size, keep, top):
            name = f"{keep:g}, " + (allocation.named(size, top) if size else "uniform")
            found.append(cell("entropykv", keep, 4, tokens, name, tiers=tiers, **more))
    return found


SHAPES: dict[str, dict[str, Any]] = {
    "uniform": {},
    "LARA windows 0.5": {"lara_window": 0.5},
    "LARA quotas 0.3": {"lara_keep": 0.3},
    "LARA quotas 0.6": {"lara_keep": 0.6},
    "inverted LARA -0.3": {"lara_keep": -0.3},
    "inverted LARA -0.6": {"lara_keep": -0.6},
    "pyramid 0.3": {"curve": "pyramid", "lara_keep": 0.3},
    "pyramid 0.6": {"curve": "pyramid", "lara_keep": 0.6},
}

CHOICES: dict[str, dict[str, Any]] = {
    "one choice a layer": {"scope": "layer"},
    "blocks of 16": {"granularity": "block"},
    "blocks of 16, one choice a layer": {"granularity": "block", "scope": "layer"},
}
