# SPDX-License-Identifier: Apache-2.0
"""`entropykv plan`: what a request of a given length will hold, before any server is started."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from entropykv_vllm.config.settings import POLICIES, EvictionConfig, load
from entropykv_vllm.plan.schedule import boundary, held_pages, peak_pages
from entropykv_vllm.plan.tiers import Tier, make_tiers


def main(argv: list[str] | None = None) -> int:
    """Print the tiers of a plan and the pages they hold; the exit code."""
    args = _parser().parse_args(argv)
    try:
        config = load(args.policy, args.config)
        tiers = make_tiers(config, range(args.layers), args.page)
    except ValueError as error:
        print(f"entropykv: error: {error}", file=sys.stderr)
        return 2
    report = _report(config, tiers, args)
    print(json.dumps(report, indent=2) if args.json else _table(report))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="entropykv plan",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        description="Show the tiers of a plan, and the tokens that a request holds in each layer.",
    )
    parser.add_argument("--policy", choices=POLICIES, default="entropykv", help="as --kv-eviction")
    parser.add_argument("--config", help="as --kv-eviction-config: a preset, a file or JSON")
    parser.add_argument("--layers", type=int, default=30, help="full-attention layers of the model")
    parser.add_argument("--page", type=int, default=32, help="tokens per page, as --block-size")
    parser.add_argument("--tokens", type=int, default=8192, help="length of the request")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _report(
    config: EvictionConfig, tiers: tuple[Tier, ...], args: argparse.Namespace
) -> dict[str, Any]:
    rows = [_row(tier, args.tokens) for tier in tiers]
    layers = sum(row["layers"] for row in rows)
    held, peak = (sum(row[key] * row["layers"] for row in rows) for key in ("held", "peak"))
    return {
        "policy": config.policy,
        "tokens": args.tokens,
        "tiers": rows,
        "held_ratio": held / (args.tokens * layers),
        "peak_ratio": peak / (args.tokens * layers),
    }


def _row(tier: Tier, tokens: int) -> dict[str, Any]:
    plan = tier.plan
    return {
        "tier": plan.name,
        "layers": len(tier.layers),
        "window": plan.window if plan.evicts else None,
        "keep": plan.keep,
        "bits": plan.bits,
        "held": held_pages(plan, boundary(plan, tokens), tokens) * plan.page,
        "peak": peak_pages(plan, tokens) * plan.page,
    }


def _table(report: dict[str, Any]) -> str:
    names = {
        "tier": "tier",
        "layers": "layers",
        "window": "window",
        "keep": "keep",
        "bits": "bits",
        "held": "tokens held",
        "peak": "at the peak",
    }
    rows = [list(names.values())]
    rows += [[_cell(row[key]) for key in names] for row in report["tiers"]]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in rows]
    summary = (
        f"{report['policy']}: of {report['tokens']:,} tokens, a layer holds "
        f"{report['held_ratio']:.0%} on average and {report['peak_ratio']:.0%} at the peak."
    )
    return "\n".join([*lines, "", summary])


def _cell(value: object) -> str:
    if value is None:
        return "all"
    if isinstance(value, float):
        return f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
