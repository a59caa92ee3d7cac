# SPDX-License-Identifier: Apache-2.0
"""Which layers a model cannot do without: each is cut in turn, all others stay whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from entropykv_vllm.evaluation.offline.cell import Cell

#: What is left of the layer that is cut.
CUT = 0.1

#: Little stays untouched in a short text: what is cut must be what is asked for.
SHORT = {"bits": 16, "window": 64, "interval": 128, "keep": 1.0}

WHOLE = Cell("whole", "none")


def cells(layers: Sequence[int]) -> list[Cell]:
    """The full cache, and a cell for each layer that is cut."""
    return [WHOLE, *(Cell(f"layer {layer}", "entropykv", _cut(layers, layer)) for layer in layers)]


def _cut(layers: Sequence[int], layer: int) -> dict[str, Any]:
    tiers = [{"name": "cut", "layers": [layer], "keep": CUT}]
    if rest := [other for other in layers if other != layer]:
        tiers.append({"name": "whole", "layers": rest, "keep": 1.0})
    return {**SHORT, "tiers": tiers}
