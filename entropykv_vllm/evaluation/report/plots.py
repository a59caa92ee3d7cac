# SPDX-License-Identifier: Apache-2.0
"""The pictures of docs/quality.md."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from entropykv_vllm.evaluation import pareto
from entropykv_vllm.evaluation.offline.cell import Cell
from entropykv_vllm.evaluation.report import tables
from entropykv_vllm.evaluation.report.sections import KEEPS, Section


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def front(cells: Sequence[Cell], results: Sequence[dict[str, Any]], path: Path, title: str) -> None:
    """Exact answers over bytes held: every cell a point, each policy's Pareto front a line."""
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for policy in dict.fromkeys(cell.policy for cell in cells if cell.policy != "none"):
        points = tables.points(cells, results, policy)
        line = pareto.front(points)
        (drawn,) = axes.plot(
            *zip(*line, strict=True),
            marker="o",
            label=policy,
            linewidth=3 if policy == "entropykv" else 1.2,
            zorder=3 if policy == "entropykv" else 2,
        )
        rest = [point for point in points if point not in line]
        if rest:
            axes.scatter(*zip(*rest, strict=True), s=12, alpha=0.4, color=drawn.get_color())
    axes.set(xscale="log", xlabel="bytes held, % of a full 16-bit cache", ylabel="exact answers, %")
    axes.set(title=title, ylim=(-2, 103))
    ticks = (*tables.BUDGETS, 100)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.grid(alpha=0.3, which="both")
    axes.legend(frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def forms(section: Section, results: Sequence[dict[str, Any]], path: Path) -> None:
    """What kinds of answers there are as keep falls, for each number of bits."""
    from entropykv_vllm.evaluation.report.forms import KINDS, kind

    pyplot = _pyplot()
    figure, panels = pyplot.subplots(1, 3, figsize=(10, 3.6), sharey=True, layout="constrained")
    for bits, axes in zip((16, 8, 4), panels, strict=True):
        names = ["full cache" if bits == 16 else f"all 1 {bits}"]
        names += [f"entropykv {keep:g} {bits}" for keep in KEEPS]
        index = {cell.name: i for i, cell in enumerate(section.cells)}
        counts = []
        for name in names:
            kinds = [kind(r["answers"][index[name]], r["wanted"][0]) for r in results]
            counts.append([100 * kinds.count(k) / len(kinds) for k in KINDS])
        axes.stackplot(range(len(names)), *zip(*counts, strict=True), labels=KINDS, alpha=0.85)
        axes.set_xticks(range(len(names)), ["1", *(f"{keep:g}" for keep in KEEPS)])
        axes.set(title=f"{bits} bits", xlabel="keep", ylim=(0, 100))
    panels[0].set_ylabel("answers, %")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right", frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
