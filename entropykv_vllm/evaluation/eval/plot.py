# SPDX-License-Identifier: Apache-2.0
"""The picture of an evaluation: accuracy against bytes held, a panel a task and length."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from entropykv_vllm.evaluation.eval.jobs import DIVERGENCE
from entropykv_vllm.evaluation.pareto import front

Results = Sequence[Mapping[str, Any]]


def draw(results: Results, path: Path) -> bool:
    """Draw the picture; return False if there is nothing to draw, or no matplotlib."""
    results = [r for r in results if r.get("held") is not None and r["spec"]["task"] != DIVERGENCE]
    try:
        import matplotlib
    except ImportError:
        return False
    if not results:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(_panel(r) for r in results))
    across = math.ceil(math.sqrt(len(names)))
    down = math.ceil(len(names) / across)
    figure, axes = pyplot.subplots(
        down, across, figsize=(5.5 * across, 4 * down), layout="constrained", squeeze=False
    )
    series = list(dict.fromkeys(r["spec"]["series"] for r in results))
    colours = {name: f"C{i}" for i, name in enumerate(series)}
    for name, panel in zip(names, axes.flat, strict=False):
        _draw_panel(panel, name, [r for r in results if _panel(r) == name], colours)
    for unused in axes.flat[len(names) :]:
        unused.axis("off")
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return True


def _panel(result: Mapping[str, Any]) -> tuple[str, int]:
    return result["spec"]["task"], result["spec"]["tokens"]


def _draw_panel(axes: Any, name: tuple[str, int], results: Results, colours: Mapping[str, str]):
    for series, colour in colours.items():
        _draw_series(axes, series, colour, [r for r in results if r["spec"]["series"] == series])
    held = [100 * r["held"] for r in results]
    axes.set_xscale("log")
    ticks = [2, 5, 10, 20, 30, 50, 70, 100]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.set(
        xlim=(0.8 * min(held), 1.25 * max(held)),
        title=f"{name[0]}, {name[1]:,} tokens",
        xlabel="bytes held, % of a 16-bit cache",
        ylabel="accuracy, %",
        ylim=(-3, 105),
    )
    axes.grid(alpha=0.3)


def _draw_series(axes: Any, series: str, colour: str, results: Results) -> None:
    """Draw all points with their intervals faintly, and the front through the best of them."""
    points = [(100 * r["held"], 100 * r["accuracy"][0]) for r in results]
    for (held, accuracy), r in zip(points, results, strict=True):
        low, high = (100 * bound for bound in r["accuracy"][1:])
        axes.errorbar(
            held, accuracy, [[accuracy - low], [high - accuracy]], fmt="o", color=colour, alpha=0.3
        )
    if points:
        x, y = zip(*front(points), strict=True)
        axes.plot(x, y, marker="o", linewidth=2.5, color=colour, label=series)
