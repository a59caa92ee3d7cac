# SPDX-License-Identifier: Apache-2.0
"""LARA, layer-adaptive recency allocation: how much more the early and late layers hold."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise


def curve(layers: int) -> list[float]:
    """The parabola over the layers, of mean 1: more than 1 at both ends, 0.5 in the middle.

    ``r_l = 0.5 * x_l^2 / mean(x^2) + 0.5`` with ``x_l = l - (layers - 1) / 2``, from the original
    EntropyKV code. With one layer there are no ends: the curve is 1.
    """
    squares = [(layer - (layers - 1) / 2) ** 2 for layer in range(layers)]
    mean = sum(squares) / layers
    return [0.5 * square / mean + 0.5 if mean else 1.0 for square in squares]


def cuts(layers: int, group: int) -> dict[str, tuple[int, int]]:
    """The tiers: `group` early layers, as many late ones, and those between, by name."""
    edges = 0, group, layers - group, layers
    return dict(zip(("early", "middle", "late"), pairwise(edges), strict=True))


def allocate(
    mean: float, strength: float, shape: Sequence[float], low: float, high: float
) -> list[float]:
    """Give each layer ``mean * (1 + strength * (shape - 1))`` within [low, high], of that mean.

    Strength 0 is uniform, 1 is the full curve, negative is inverted. What the limits take from
    one layer goes to the layers that are not at a limit, so the total never depends on the
    strength.

    Raises:
        ValueError: if `mean` itself is outside [low, high].
    """
    if not low <= mean <= high:
        raise ValueError(f"the mean {mean} is outside [{low}, {high}]")
    values = [min(high, max(low, mean * (1 + strength * (s - 1)))) for s in shape]
    for _ in range(len(values)):
        missing = mean * len(values) - sum(values)
        limit = high if missing > 0 else low
        free = [i for i, value in enumerate(values) if value != limit]
        if abs(missing) < 1e-9 or not free:
            break
        for i in free:
            values[i] = min(high, max(low, values[i] + missing / len(free)))
    return values
