# SPDX-License-Identifier: Apache-2.0
"""PyramidKV's allocation (arXiv 2406.02069): early layers keep much, late ones little."""

from __future__ import annotations

#: What the last layer keeps of the mean: the paper's beta is 20.
LAST = 1 / 20


def curve(layers: int) -> list[float]:
    """The straight line over the layers, of mean 1, that ends at `LAST`.

    With one layer there is nothing to share out: the curve is 1.
    """
    if layers == 1:
        return [1.0]
    return [2 - LAST - 2 * (1 - LAST) * layer / (layers - 1) for layer in range(layers)]


def cuts(layers: int, group: int) -> dict[str, tuple[int, int]]:
    """The tiers: runs of `group` layers, by name."""
    return {
        f"part{i + 1}": (start, min(start + group, layers))
        for i, start in enumerate(range(0, layers, group))
    }
