# SPDX-License-Identifier: Apache-2.0
"""Times of calls that run by turns, so that a machine's moods hit them all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any


def interleaved(
    calls: Mapping[str, Callable[[int], None]], seconds: float, rounds: int
) -> dict[str, list[float]]:
    """Call each by turns until `seconds` have passed and there were enough rounds.

    Args:
        calls: functions of the number of the round; round 0 is not timed.
        seconds: how long to go on, all calls together.
        rounds: the least number of rounds.

    Returns:
        The seconds of each call.
    """
    for call in calls.values():
        call(0)
    times: dict[str, list[float]] = {name: [] for name in calls}
    end, turn = time.perf_counter() + seconds, 0
    while turn < rounds or time.perf_counter() < end:
        turn += 1
        for name, call in calls.items():
            before = time.perf_counter()
            call(turn)
            times[name].append(time.perf_counter() - before)
    return times


def summary(times: list[float]) -> dict[str, Any]:
    """Return the median of some seconds, their quartiles, and how many there are."""
    low, middle, high = (
        statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else times * 3
    )
    return {"median": middle, "quartiles": [low, high], "count": len(times)}
