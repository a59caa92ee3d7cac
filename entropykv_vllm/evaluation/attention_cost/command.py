# SPDX-License-Identifier: Apache-2.0
"""`entropykv attention-cost`: what scores that read attention cost, in bytes and in seconds.

For one layer, three ways to know which tokens matter: from the whole matrix of attention, as eager
implementations make it; from a side table that is added to step by step; and from keys and values
alone. The bytes are computed, and measured as the growth of a fresh process.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from entropykv_vllm.errors import UsageError
from entropykv_vllm.evaluation import cells, machine, options, resident, table
from entropykv_vllm.evaluation.attention_cost import plot
from entropykv_vllm.evaluation.progress import bar
from entropykv_vllm.help_text import command_parser
from entropykv_vllm.json_file import add_json, show
from entropykv_vllm.option_values import LENGTH, Real, Whole

FLOAT = 4  # bytes of the float32 numbers that all ways work with
# way -> the policy that it stands for
WAYS = {"matrix": "h2o", "table": "h2o", "free": "entropykv"}
LIMITS = [8.0, 24.0]
WIDTH = Whole(1, 4096)


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    p = command_parser("attention-cost", __doc__)
    p.add_argument("--query-heads", type=WIDTH, default=9, help="of the layer")
    p.add_argument("--kv-heads", type=WIDTH, default=3, help="of the layer")
    p.add_argument("--head-size", type=WIDTH, default=64, help="channels of a head")
    p.add_argument("--longest", type=LENGTH, default=32768, help="tokens of the last row")
    p.add_argument(
        "--memory", type=Real(), help="GB to use at most (default: half of what is free)"
    )
    options.add_out(p, "results/attention-cost")
    add_json(p)
    return p


def lengths(longest: int) -> list[int]:
    """Return 1k, 2k, ... tokens."""
    return [1024 << i for i in range(max(1, (longest // 1024).bit_length()))]


def matrix_bytes(query_heads: int, tokens: int) -> int:
    """Return the bytes of the attention of all queries to all tokens."""
    return query_heads * tokens**2 * FLOAT


def matrix_peak(query_heads: int, tokens: int) -> int:
    """Return what making it takes: logits, weights, and a mask of a byte a pair."""
    return 2 * matrix_bytes(query_heads, tokens) + tokens**2


def passes(query_heads: int, limit: float) -> int:
    """Return the fewest tokens whose matrix is larger than `limit` bytes."""
    return math.isqrt(int(limit) // (query_heads * FLOAT)) + 1


def computed(args: argparse.Namespace, tokens: int) -> dict[str, int]:
    """Return the bytes that follow from the shape."""
    return {
        "tokens": tokens,
        "matrix": matrix_bytes(args.query_heads, tokens),
        "table": args.kv_heads * tokens * FLOAT,
        "cache": 2 * args.kv_heads * args.head_size * tokens * FLOAT,
    }


def measure(args: argparse.Namespace, room: float) -> list[dict[str, Any]]:
    """Measure all ways at all lengths, the matrix where it fits into `room` bytes."""
    shape = [args.query_heads, args.kv_heads, args.head_size]
    rows: list[dict[str, Any]] = [
        {**computed(args, tokens), "measured": {}} for tokens in lengths(args.longest)
    ]
    todo = [
        (row, way)
        for row in rows
        for way in WAYS
        if way != "matrix" or matrix_peak(args.query_heads, row["tokens"]) <= room
    ]
    for row, way in bar(todo, "cell"):
        spec = {"way": way, "policy": WAYS[way], "shape": shape, "tokens": row["tokens"]}
        path = args.out / f"{way}-{row['tokens']}.json"
        found = cells.run("entropykv_vllm.evaluation.attention_cost.cell", spec, path)
        row["measured"][way] = {key: value for key, value in found.items() if key != "spec"}
    return rows


HEADER = [
    "tokens",
    "matrix MB",
    "peak MB",
    "s",
    "side table MB",
    "its peak MB",
    "its s",
    "attention-free, peak MB",
    "its s",
]


def table_rows(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Return the rows of the table."""
    return [
        [
            f"{row['tokens']}",
            megabytes(row["matrix"]),
            *cost(row, "matrix"),
            megabytes(row["table"]),
            *cost(row, "table"),
            *cost(row, "free"),
        ]
        for row in rows
    ]


def cost(row: dict[str, Any], way: str) -> list[str]:
    """Return what was measured of a way: megabytes and seconds of all processors."""
    if (found := row["measured"].get(way)) is None:
        return ["–", "–"]
    return [megabytes(found["bytes"]), f"{found['processor seconds']['median']:.3g}"]


def megabytes(count: float) -> str:
    """Write bytes as MB, to a hundredth where that is much."""
    return f"{count / 1e6:.2f}" if count < 10e6 else f"{count / 1e6:,.0f}"


def limits_line(args: argparse.Namespace) -> str:
    """Say where one layer's matrix alone passes the memory of common cards."""
    parts = [f"{limit:g} GB at {passes(args.query_heads, limit * 1e9):,}" for limit in LIMITS]
    return f"One layer's matrix passes {' and '.join(parts)} tokens."


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    args = parser().parse_args(argv)
    if args.query_heads % args.kv_heads:
        raise UsageError(f"--kv-heads {args.kv_heads} do not divide --query-heads")
    room = resident.available() / 2 if args.memory is None else args.memory * 1e9
    rows = measure(args, room)
    text = f"{table.render(HEADER, table_rows(rows))}\n\n{limits_line(args)}"
    title = (
        f"One layer of {args.query_heads}/{args.kv_heads} heads of {args.head_size}, float32; "
        "seconds of processor time"
    )
    report = save(args, room, rows, text)
    show(f"\n{title}\n\n{text}", report, args.json)
    return 0


def save(
    args: argparse.Namespace, room: float, rows: list[dict[str, Any]], text: str
) -> dict[str, Any]:
    """Write table, picture and all figures; return the figures."""
    (args.out / "table.md").write_text(text + "\n")
    report = {
        "shape": [args.query_heads, args.kv_heads, args.head_size],
        "room": room,
        "passes": {f"{limit:g} GB": passes(args.query_heads, limit * 1e9) for limit in LIMITS},
        "rows": rows,
        **machine.processor(Path("/proc/cpuinfo").read_text()),
        "cores": os.cpu_count(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    (args.out / "table.json").write_text(json.dumps(report, indent=1) + "\n")
    if not plot.draw(rows, LIMITS, args.out / "bytes.png"):
        print("no picture: matplotlib is missing", file=sys.stderr)
    return report


if __name__ == "__main__":
    raise SystemExit(main())
