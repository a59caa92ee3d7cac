# SPDX-License-Identifier: Apache-2.0
"""The picture of the kernel benchmark: how many times as fast as vLLM's our decode is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from entropykv_vllm.evaluation.bench_kernels.rows import BITS, of_part, ratios


def draw(results: list[dict[str, Any]], path: Path) -> bool:
    """Draw the picture, an axis a run; False without matplotlib or without decode cases."""
    runs = [run for run in results if of_part(run, "decode")]
    try:
        import matplotlib
    except ImportError:
        return False
    if not runs:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    wide = max(6, 3 + 0.35 * max(len(of_part(run, "decode")) for run in runs))
    figure, axes = pyplot.subplots(
        len(runs),
        figsize=(wide, 2.6 * len(runs) + 1),
        sharex=True,
        squeeze=False,
        layout="constrained",
    )
    for axis, run in zip(axes[:, 0], runs, strict=True):
        _run(axis, run)
    axes[0, 0].legend(frameon=False, ncols=len(BITS))
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return True


def _run(axis: Any, run: dict[str, Any]) -> None:
    cases, spec = of_part(run, "decode"), run["spec"]
    for bits, marker in zip(BITS, "osD", strict=True):
        heights = [ratios(case)[bits] for case in cases]
        axis.plot(heights, marker, label=f"{bits} bit")
    labels = [f"{c['shape']}, {c['sequences']} × {c['tokens'] / 1024:g}k" for c in cases]
    axis.set_xticks(range(len(cases)), labels, rotation=90, fontsize=8)
    axis.axhline(1, color="gray", linewidth=1)
    threads, pages = spec["threads"], "huge" if spec["huge"] else "small"
    axis.set(ylabel="× vLLM", ylim=(0, None))
    axis.set_title(f"decode, {threads} thread{'s' * (threads > 1)}, {pages} pages", fontsize=10)
    axis.grid(alpha=0.3)
