# SPDX-License-Identifier: Apache-2.0
"""Where the time of a step goes, as torch's profiler sees it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

#: A part of a step, and how the names of its operations begin.
PARTS = {
    "attention": ("entropykv::attention", "_C::cpu_attention"),
    "matrix products": ("_C::onednn_mm", "aten::mm", "aten::addmm", "aten::bmm"),
    "writing keys and values": ("entropykv::write", "_C::cpu_attn_reshape_and_cache"),
    "moving pages": ("entropykv::",),
}
OTHER, PYTHON = "other operations", "outside of operations"


def of(step: Callable[[], Any], steps: int) -> dict[str, float]:
    """Run `step` so often; the mean seconds of one by part.

    What the operations take themselves, without those that they call, is summed by part. The rest
    of the time is Python's: scheduler, runner, and the profiler's own. So the sum is longer than a
    step without the profiler.
    """
    from torch.profiler import ProfilerActivity, profile

    start = time.perf_counter()
    with profile(activities=[ProfilerActivity.CPU]) as found:
        for _ in range(steps):
            step()
        seconds = time.perf_counter() - start
    averages = found.key_averages()
    return summary(((a.key, a.self_cpu_time_total / 1e6) for a in averages), seconds, steps)


def summary(times: Iterable[tuple[str, float]], seconds: float, steps: int) -> dict[str, float]:
    """Return the mean seconds of a step by part, of (operation, its own seconds in all)."""
    parts = dict.fromkeys((*PARTS, OTHER), 0.0)
    for name, own in times:
        parts[part_of(name)] += own / steps
    return {**parts, PYTHON: max(0.0, seconds / steps - sum(parts.values()))}


def part_of(name: str) -> str:
    """Return the part that an operation belongs to."""
    return next((part for part, heads in PARTS.items() if name.startswith(heads)), OTHER)
