# SPDX-License-Identifier: Apache-2.0
"""Tiers out of the layers' sensitivities: the most sensitive keep all, the others pay for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

#: A tier that keeps less than this is as good as none.
LEAST = 0.01


def ranked(sensitivity: Mapping[int, float]) -> list[int]:
    """The layers, the most sensitive first."""
    return sorted(sensitivity, key=lambda layer: (-sensitivity[layer], layer))


def sizes(layers: int) -> list[int]:
    """How many layers may be kept whole so that vLLM's groups of layers need no padding.

    All groups have as many layers, so the number must divide the number of the others.
    """
    return [size for size in range(1, layers // 2 + 1) if layers % size == 0]


def named(whole: int, top: float) -> str:
    """Say how many layers keep how much: what tells tiers of one mean apart."""
    return f"1 layer keeps {top:g}" if whole == 1 else f"{whole} layers keep {top:g}"


def tiers(
    order: Sequence[int], whole: int, keep: float, top: float = 1.0
) -> list[dict[str, Any]] | None:
    """Two tiers whose mean keep ratio is `keep`; None if the first leaves nothing for the second.

    Args:
        order: the layers, the most sensitive first.
        whole: how many of them are in the first tier.
        keep: the mean over all layers.
        top: what the first tier keeps.
    """
    if whole == 0:
        return [{"name": "all", "layers": sorted(order), "keep": keep}]
    rest = (keep * len(order) - top * whole) / (len(order) - whole)
    if rest < LEAST or rest > 1:
        return None
    return [
        {"name": "sensitive", "layers": sorted(order[:whole]), "keep": top},
        {"name": "rest", "layers": sorted(order[whole:]), "keep": round(rest, 4)},
    ]
