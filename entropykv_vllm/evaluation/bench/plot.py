# SPDX-License-Identifier: Apache-2.0
"""The picture of a bench: how fast, and how right, beside each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def draw(results: list[dict[str, Any]], path: Path) -> bool:
    """Draw the picture; return False if matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [result["name"] for result in results]
    figure, (fast, right) = pyplot.subplots(1, 2, figsize=(9, 4), layout="constrained", sharey=True)
    for axes, key, title in (
        (fast, "tokens a second while all decode", "tokens of answers a second, while all decode"),
        (fast, "tokens a second", "from the first request to the last token"),
    ):
        axes.barh(
            names,
            [result[key] or 0 for result in results],
            height=0.7 if "while" in key else 0.35,
            color="#9ecae1" if "while" in key else "#08519c",
            label=title,
        )
    shares = [result["exact"] for result in results]
    errors = [
        [100 * (s - low) for s, low, _ in shares],
        [100 * (high - s) for s, _, high in shares],
    ]
    right.errorbar(
        [100 * s for s, _, _ in shares], names, xerr=errors, fmt="o", capsize=3, color="#d95f0e"
    )
    fast.set(xlabel="tokens a second")
    right.set(xlabel="needles found, %", xlim=(-3, 103))
    fast.invert_yaxis()
    figure.legend(frameon=False, loc="outside upper left", ncols=2, fontsize=9)
    for axes in (fast, right):
        axes.grid(alpha=0.3, axis="x")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return True
