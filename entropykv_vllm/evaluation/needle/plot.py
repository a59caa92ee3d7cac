# SPDX-License-Identifier: Apache-2.0
"""The picture of a needle table: exact answers over the keep ratio, a line a policy."""

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

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for name in dict.fromkeys(_name(r) for r in results):
        _line(axes, name, [r for r in results if _name(r) == name])
    axes.set(
        xlabel="KV-cache pages held, % of the full cache", ylabel="exact answers, %", ylim=(-2, 103)
    )
    axes.set_title(f"Needle in {results[0]['spec']['tokens']:,} tokens")
    axes.invert_xaxis()
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return True


def _name(result: dict[str, Any]) -> str:
    spec = result["spec"]
    return str(spec.get("eviction", {}).get("preset", spec["policy"]))


def _line(axes: Any, policy: str, cells: list[dict[str, Any]]) -> None:
    cells = sorted(cells, key=lambda r: -r["held"])
    shares, lows, highs = zip(*(r["exact"] for r in cells), strict=True)
    below = [100 * (share - low) for share, low in zip(shares, lows, strict=True)]
    above = [100 * (high - share) for share, high in zip(shares, highs, strict=True)]
    axes.errorbar(
        [100 * r["held"] for r in cells],
        [100 * share for share in shares],
        [below, above],
        marker="o",
        capsize=3,
        label="full cache" if policy == "none" else policy,
    )
