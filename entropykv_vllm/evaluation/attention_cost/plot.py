# SPDX-License-Identifier: Apache-2.0
"""The picture of what scores cost: bytes over tokens, a line a way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

LINES = {
    "matrix": ("one matrix of attention", "o-"),
    "table": ("side table of masses", "s-"),
    "cache": ("keys and values, for comparison", ":"),
}


def draw(rows: list[dict[str, Any]], limits: list[float], path: Path) -> bool:
    """Draw the picture; return False if matplotlib is not installed.

    Args:
        rows: `tokens`, the computed bytes of each of LINES, and the `measured` growth by way.
        limits: GB at which to draw a line.
    """
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    tokens = [row["tokens"] for row in rows]
    for name, (label, style) in LINES.items():
        axes.plot(tokens, [row[name] for row in rows], style, label=label)
    peaks = [
        (r["tokens"], r["measured"]["matrix"]["bytes"]) for r in rows if "matrix" in r["measured"]
    ]
    if peaks:
        axes.plot(*zip(*peaks, strict=True), "x", color="C0", label="measured while it is made")
    for limit in limits:
        axes.axhline(limit * 1e9, color="gray", linewidth=1)
        axes.annotate(f"{limit:g} GB", (tokens[0], limit * 1e9), va="bottom", color="gray")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(tokens, [f"{count / 1024:g}k" for count in tokens])
    axes.set(xlabel="tokens", ylabel="bytes, one layer")
    axes.grid(alpha=0.3)
    figure.legend(frameon=False, loc="outside upper center", ncols=2)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return True
