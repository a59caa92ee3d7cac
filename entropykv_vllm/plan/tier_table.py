# SPDX-License-Identifier: Apache-2.0
"""The tiers of a plan, and what a request holds in each layer of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from entropykv_vllm.plan.schedule import boundary, held_pages, held_tokens, peak_pages
from entropykv_vllm.plan.tiers import Tier

_NAMES = {
    "tier": "tier",
    "layers": "layers",
    "window": "window",
    "keep": "keep",
    "bits": "bits",
    "cold": "tokens an old page",
    "held_tokens": "tokens held",
    "held_pages": "pages held",
    "peak_pages": "at the peak",
}


def tier_report(policy: str, tiers: Sequence[Tier], tokens: int, item_bytes: int) -> dict[str, Any]:
    """Return everything that is printed, as JSON has it; averages are over the layers."""
    rows = [_row(tier, tokens) for tier in tiers]
    layers = sum(row["layers"] for row in rows)
    total = {
        key: sum(row[key] * row["layers"] for row in rows) / layers
        for key in ("held_tokens", "held_pages", "peak_pages")
    }
    page = tiers[0].plan.page
    full = tokens / page * 2 / item_bytes  # in our pages, which may be of 32 bits
    return {
        "policy": policy,
        "tokens": tokens,
        "page": page,
        "tiers": rows,
        "held_tokens": total["held_tokens"] / tokens,
        "held_times_smaller": full / total["held_pages"],
        "peak_times_smaller": full / total["peak_pages"],
    }


def _row(tier: Tier, tokens: int) -> dict[str, Any]:
    plan = tier.plan
    at = boundary(plan, tokens)
    return {
        "tier": plan.name,
        "layers": len(tier.layers),
        "window": plan.window if plan.compresses else None,
        "keep": plan.keep,
        "bits": plan.bits,
        "cold": plan.cold,
        "held_tokens": held_tokens(plan, at, tokens),
        "held_pages": held_pages(plan, at, tokens),
        "peak_pages": peak_pages(plan, tokens),
    }


def tier_text(report: dict[str, Any]) -> str:
    """The table and two lines below it."""
    rows = [list(_NAMES.values())]
    rows += [[_cell(row[key]) for key in _NAMES] for row in report["tiers"]]
    summary = (
        f"{report['policy']}: a layer holds {report['held_tokens']:.0%} of {report['tokens']:,} "
        f"tokens on average, in pages of {report['page']}.\nAgainst a full cache of 16 bits, that "
        f"is {report['held_times_smaller']:.2f} x smaller, and "
        f"{report['peak_times_smaller']:.2f} x at the peak."
    )
    return f"{columns(rows)}\n\n{summary}"


def columns(rows: Sequence[Sequence[str]], left: int = 0) -> str:
    """Rows of cells as aligned lines, the first `left` columns to the left, all others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def _cell(value: object) -> str:
    if value is None:
        return "all"
    if isinstance(value, float):
        return f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
