# SPDX-License-Identifier: Apache-2.0
"""`entropykv bench-concurrency`: how many long requests does one KV pool serve at a time?

Stock vLLM and an eviction policy get the same pool in bytes, the same requests, threads and
settings, and run by turns, each run in a process of its own. Stock vLLM runs without the plugin.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from typing import Any

from entropykv_vllm.config.settings import POLICIES
from entropykv_vllm.evaluation import cells, engines, options, pool, table
from entropykv_vllm.evaluation.options import settings
from entropykv_vllm.evaluation.progress import bar, onto
from entropykv_vllm.help_text import command_parser
from entropykv_vllm.json_file import add_json, show
from entropykv_vllm.option_values import COUNT, LENGTH, Whole

# name of a value, decimals
ROWS = {
    "seconds": 1,
    "output tokens/s": 2,
    "running at most": 0,
    "answering at most": 0,
    "mean wait in s": 1,
    "preemptions": 0,
    "pool used at most": 2,
}


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    p = command_parser("bench-concurrency", __doc__)
    options.add_model(p)
    p.add_argument("--policy", choices=POLICIES, default="entropykv", help="beside vLLM alone")
    options.add_keep(p)
    p.add_argument("--config", type=settings, default="{}", help="more eviction settings, as JSON")
    p.add_argument(
        "--pool-tokens", type=Whole(), default=20_000, help="full tokens that the pool holds"
    )
    p.add_argument("--requests", type=COUNT, default=8, help="how many, all at once")
    p.add_argument("--tokens", type=LENGTH, default=6000, help="prompt length of a request")
    p.add_argument("--output", type=LENGTH, default=64, help="tokens to answer")
    p.add_argument("--repeats", type=COUNT, default=2, help="of both, by turns")
    p.add_argument("--engine", type=settings, default="{}", help="vLLM arguments for both, as JSON")
    p.add_argument("--stock", type=settings, default="{}", help="more of them for stock vLLM")
    options.add_out(p, "results/concurrency")
    add_json(p)
    return p


def spec(args: argparse.Namespace, policy: str, repeat: int) -> dict[str, Any]:
    """Return what decides the result of a run."""
    shape = pool.shape(engines.model_folder(args.model))
    engine = {
        "max_model_len": args.tokens + args.output,
        "max_num_seqs": args.requests,
        "kv_cache_memory_bytes": pool.pool_bytes(shape, args.pool_tokens),
        **args.engine,
    }
    stock = policy == "none"
    return {
        "policy": policy,
        "eviction": {} if stock else engines.eviction(policy, args.keep, args.tokens, args.config),
        "model": args.model,
        "requests": args.requests,
        "tokens": args.tokens,
        "output": args.output,
        "repeat": repeat,
        "engine": {**engine, **(args.stock if stock else {})},
    }


def turns(policy: str, repeats: int) -> list[tuple[str, int]]:
    """Return the order of the runs: each pair the other way round, so that drift cancels out."""
    pairs = [("none", policy), (policy, "none")]
    return [(name, repeat) for repeat in range(repeats) for name in pairs[repeat % 2]]


def rows(results: list[dict[str, Any]], policy: str) -> list[list[str]]:
    """Return the rows of the table: the median of the repeats, and ours over stock vLLM's."""
    lines = []
    for name, decimals in ROWS.items():
        stock, ours = (
            statistics.median(r[name] for r in results if r["spec"]["policy"] == which)
            for which in ("none", policy)
        )
        ratio = f"{ours / stock:.2f}" if stock else "–"
        lines.append([name, f"{stock:.{decimals}f}", f"{ours:.{decimals}f}", ratio])
    return lines


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run all runs by turns."""
    results = []
    with bar(2 * args.repeats * args.requests, "request") as shown:
        for i, (policy, repeat) in enumerate(turns(args.policy, args.repeats)):
            shown.set_description(f"{policy} {repeat + 1}/{args.repeats}")
            progress = onto(shown, i * args.requests)
            results.append(
                cells.run(
                    "entropykv_vllm.evaluation.concurrency_cell",
                    spec(args, policy, repeat),
                    args.out / f"{policy}-{repeat}.json",
                    progress,
                )
            )
            progress(args.requests, args.requests)
    return results


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    args = parser().parse_args(argv)
    engines.check_length(args.model, args.tokens, args.output, "the answer")
    options.check_settings([(args.policy, spec(args, args.policy, 0)["eviction"])])
    options.check_out(args.out)
    results = measure(args)
    text = table.render(
        ["", "stock vLLM", f"{args.policy} {args.keep:g}", "ratio"], rows(results, args.policy)
    )
    pool_bytes = results[0]["spec"]["engine"]["kv_cache_memory_bytes"]
    title = (
        f"{args.requests} requests of {args.tokens}+{args.output} tokens in a pool of "
        f"{args.pool_tokens} full tokens ({pool_bytes / 2**20:.0f} MiB), median of "
        f"{args.repeats}"
    )
    (args.out / "table.md").write_text(text + "\n")
    (args.out / "table.json").write_text(json.dumps(results, indent=1) + "\n")
    show(f"\n{title}\n\n{text}", results, args.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
