# SPDX-License-Identifier: Apache-2.0
"""What the steps of a run come to, and what a setting adds to vLLM's alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from entropykv_vllm.evaluation.bench_overhead.parts import PLANNER

ROUNDS = 2000

Steps = Mapping[str, Sequence[float]]


def planner(steps: Steps) -> list[float]:
    """The seconds of each step that go to the planner's parts."""
    return [sum(times) for times in zip(*(steps[name] for name in PLANNER), strict=True)]


def medians(steps: Steps) -> dict[str, list[float]]:
    """`[median, low, high]` of each part, with 95 % intervals over steps."""
    return {name: _estimate("median", times) for name, times in steps.items()}


def means(steps: Steps) -> dict[str, list[float]]:
    """`[mean, low, high]` of each part: steps that move pages count here."""
    return {name: _estimate("mean", times) for name, times in steps.items()}


def added(ours: Steps, stock: Steps) -> dict[str, list[float]]:
    """What the planner's parts take more than in vLLM alone: of the medians, and of the means."""
    both = planner(ours), planner(stock)
    return {kind: _estimate(kind, *both) for kind in ("median", "mean")}


def _estimate(kind: str, *samples: Sequence[float]) -> list[float]:
    """Of a sample, or of one less another: `[value, low, high]`, by resampling steps."""
    import numpy as np

    middle: Callable[..., Any] = np.median if kind == "median" else np.mean
    rng = np.random.default_rng(0)
    value, resampled = 0.0, np.zeros(ROUNDS)
    for sign, sample in zip((1, -1), samples, strict=False):
        some = rng.choice(np.asarray(sample), (ROUNDS, len(sample)))
        value += sign * float(middle(sample))
        resampled += sign * middle(some, axis=1)
    low, high = np.quantile(resampled, (0.025, 0.975))
    return [value, float(low), float(high)]
