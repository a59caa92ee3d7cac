# SPDX-License-Identifier: Apache-2.0
"""The picture of a search: right answers against bytes held, and where the target is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from entropykv_vllm.evaluation.calibration.run import Summary
from entropykv_vllm.evaluation.tune.choice import interval
from entropykv_vllm.evaluation.tune.race import Standing


def draw(found: Sequence[Standing], winner: Summary | None, target: float, path: Path) -> bool:
    """Draw the picture; return False if matplotlib is not installed.

    Args:
        found: all standings, the full cache first.
        winner: the best of them.
        target: the share of the full cache's right answers that is to be kept.
        path: of the picture.
    """
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    texts, goal = found[0].texts, 100 * target * found[0].mean().right
    left = [one for one in found if one.texts == texts]
    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    _points(axes, [one for one in found if one.texts < texts], "given up", "0.75")
    _points(axes, left, f"asked all {texts} texts", "C0")
    axes.axhline(goal, color="C2", linestyle="--", label=f"target, {goal:.0f} %")
    if winner is not None:
        at = (100 * winner.held, 100 * winner.right)
        axes.plot(*at, "*", color="C3", markersize=14, label=winner.cell.name)
    axes.set(
        xscale="log",
        ylim=(-3, 105),
        xlabel="bytes held, % of a 16-bit cache",
        ylabel="right answers, % (95 %)",
    )
    ticks = [5, 10, 20, 30, 50, 70, 100]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return True


def _points(axes: Any, found: Sequence[Standing], label: str, colour: str) -> None:
    if not found:
        return
    shares = [interval(one.mean(), one.texts) for one in found]
    errors = [
        [100 * (share - low) for share, low, _ in shares],
        [100 * (high - share) for share, _, high in shares],
    ]
    axes.errorbar(
        [100 * one.held for one in found],
        [100 * share for share, _, _ in shares],
        errors,
        fmt="o",
        color=colour,
        alpha=0.6,
        label=label,
    )
