# SPDX-License-Identifier: Apache-2.0
"""`entropykv plan`: what a request of a given length will hold, before any server is started."""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from typing import Any

from entropykv_vllm.config.settings import POLICIES, EvictionConfig, load, parse
from entropykv_vllm.plan.capacity import capacity
from entropykv_vllm.plan.schedule import boundary, held_pages, held_tokens, peak_pages
from entropykv_vllm.plan.tiers import Tier, make_tiers
from entropykv_vllm.serving.settings import page_size

ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


def main(argv: list[str] | None = None) -> int:
    """Print the tiers of a plan and what they hold; the exit code."""
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    try:
        config = load(args.policy, {**parse(args.config), **_dotted(rest, parser)})
        tiers = _tiers(config, args)
    except ValueError as error:
        print(f"entropykv: error: {error}", file=sys.stderr)
        return 2
    report = _report(config, tiers, args)
    print(json.dumps(report, indent=2) if args.json else _table(report))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="entropykv plan",
        description="Show the tiers of a plan, and what a request holds in each layer.",
        epilog="Single settings are --config.NAME VALUE, such as --config.keep 0.3.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--policy", choices=POLICIES, default="entropykv", help="as --kv-eviction (%(default)s)")
    add("--config", help="as --kv-eviction-config: a preset, a file or JSON")
    add("--layers", type=int, default=30, help="full-attention layers of the model (%(default)s)")
    add("--head-size", type=int, default=64, help="channels of a KV head (%(default)s)")
    add("--dtype", choices=ITEM_BYTES, default="bfloat16", help="of the KV cache (%(default)s)")
    add("--page", type=int, help="tokens per page, as --block-size (64 with 8 bits, else 32)")
    add("--tokens", type=int, default=8192, help="length of the request (%(default)s)")
    add("--json", action="store_true", help="print JSON")
    return parser


def _dotted(words: list[str], parser: argparse.ArgumentParser) -> dict[str, Any]:
    """Settings given as `--config.NAME VALUE` or `--config.NAME=VALUE`."""
    words = [p for w in words for p in (w.split("=", 1) if w.startswith("--") else [w])]
    names, values = words[::2], words[1::2]
    if len(names) != len(values) or not all(name.startswith("--config.") for name in names):
        parser.error(f"unrecognized arguments: {' '.join(words)}")
    pairs = zip(names, values, strict=True)
    return {name.removeprefix("--config."): _value(value) for name, value in pairs}


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _tiers(config: EvictionConfig, args: argparse.Namespace) -> tuple[Tier, ...]:
    _check(args)
    page = page_size(config) if args.page is None else args.page
    fits = partial(capacity, args.head_size, page, ITEM_BYTES[args.dtype])
    return make_tiers(config, range(args.layers), page, fits)


def _check(args: argparse.Namespace) -> None:
    if args.tokens < 1 or (args.page is not None and (args.page < 16 or args.page % 16)):
        raise ValueError("--tokens must be 1 or more, and --page a multiple of 16")


def _report(
    config: EvictionConfig, tiers: tuple[Tier, ...], args: argparse.Namespace
) -> dict[str, Any]:
    rows = [_row(tier, args.tokens) for tier in tiers]
    layers = sum(row["layers"] for row in rows)
    total = {
        key: sum(row[key] * row["layers"] for row in rows) / layers
        for key in ("held_tokens", "held_pages", "peak_pages")
    }
    page = tiers[0].plan.page
    full = args.tokens / page * 2 / ITEM_BYTES[args.dtype]  # in our pages, which may be of 32 bits
    return {
        "policy": config.policy,
        "tokens": args.tokens,
        "page": page,
        "tiers": rows,
        "held_tokens": total["held_tokens"] / args.tokens,
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


def _table(report: dict[str, Any]) -> str:
    names = {
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
    rows = [list(names.values())]
    rows += [[_cell(row[key]) for key in names] for row in report["tiers"]]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in rows]
    summary = (
        f"{report['policy']}: a layer holds {report['held_tokens']:.0%} of {report['tokens']:,} "
        f"tokens on average, in pages of {report['page']}.\nAgainst a full cache of 16 bits, that "
        f"is {report['held_times_smaller']:.2f} x smaller, and "
        f"{report['peak_times_smaller']:.2f} x at the peak."
    )
    return "\n".join([*lines, "", summary])


def _cell(value: object) -> str:
    if value is None:
        return "all"
    if isinstance(value, float):
        return f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
