# SPDX-License-Identifier: Apache-2.0
"""The settings that no other beats at as few bytes."""

from __future__ import annotations

from collections.abc import Sequence


def front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points (bytes, accuracy) that no other beats in both, from few bytes to many."""
    best: list[tuple[float, float]] = []
    for held, accuracy in sorted(points, key=lambda p: (p[0], -p[1])):
        if not best or accuracy > best[-1][1]:
            best.append((held, accuracy))
    return best
