# SPDX-License-Identifier: Apache-2.0
"""Settings to be searched, and which of them are still worth a try."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from entropykv_vllm.evaluation.calibration import allocation
from entropykv_vllm.evaluation.offline.cell import Cell
from entropykv_vllm.evaluation.presets import PRESETS
from entropykv_vllm.evaluation.scoring import wilson

KEEPS = (1.0, 0.75, 0.5, 0.35, 0.25, 0.15, 0.1, 0.06)
#: Quotas by calibration start where uniform ones begin to lose.
TIERED = (0.5, 0.35, 0.25, 0.15, 0.1, 0.06)
#: Shares of the layers that are tried as the sensitive ones.
SENSITIVE = (0.1, 0.2, 0.34)
#: What they keep.
TOPS = (1.0, 0.5)

WHOLE = Cell("full cache", "none")


def cells(order: Sequence[int], windows: Sequence[int]) -> list[Cell]:
    """The full cache, the presets, uniform quotas and calibrated ones.

    Args:
        order: the full-attention layers, the most sensitive first.
        windows: recency windows to try.
    """
    found = [WHOLE]
    found += [Cell(n, p, {"preset": n}) for n, p in PRESETS.items() if p == "entropykv"]
    for window in windows:
        found += [_uniform(keep, bits, window) for keep in KEEPS for bits in (8, 4)]
        found += _tiered(order, window)
    return found


def _settings(keep: float, bits: int, window: int) -> dict[str, Any]:
    # Boundaries must come often, or new tokens outweigh what the old ones save.
    return {"keep": keep, "bits": bits, "window": window, "interval": max(window, 128)}


def _uniform(keep: float, bits: int, window: int) -> Cell:
    name = f"keep {keep:g}, {bits} bits, window {window}"
    return Cell(name, "entropykv", _settings(keep, bits, window))


def _tiered(order: Sequence[int], window: int) -> list[Cell]:
    found = []
    sizes = {_nearest(share * len(order), allocation.sizes(len(order))) for share in SENSITIVE}
    for keep in TIERED:
        for size in sorted(sizes):
            for top in TOPS:
                tiers = allocation.tiers(order, size, keep, top)
                if tiers and top > keep:
                    which = allocation.named(size, top)
                    name = f"keep {keep:g}, 4 bits, window {window}, {which}"
                    settings = {**_settings(keep, 4, window), "tiers": tiers}
                    found.append(Cell(name, "entropykv", settings))
    return found


def _nearest(value: float, choices: Sequence[int]) -> int:
    return min(choices, key=lambda choice: (abs(choice - value), choice))


def hopeful(right: Sequence[int], trials: int, target: float) -> list[int]:
    """The cells, by number, that may still be right in a share `target` of all texts."""
    return [i for i, hits in enumerate(right) if wilson(hits, trials)[1] >= target]
