# SPDX-License-Identifier: Apache-2.0
"""`entropykv needle`: does a number hidden in a long text survive eviction?

The question comes at the end of the prompt, after the text before it was compressed, and fits
into the recency window, so no policy can look at it to choose. All answers come out of the
engine, greedily.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from entropykv_vllm.config.settings import load
from entropykv_vllm.errors import RunError, UsageError
from entropykv_vllm.evaluation import (
    cells,
    corpus,
    engines,
    identity,
    options,
    pool,
    prompts,
    scoring,
    table,
)
from entropykv_vllm.evaluation.needle import plot
from entropykv_vllm.evaluation.needle.cell import ANSWER_TOKENS
from entropykv_vllm.evaluation.options import words
from entropykv_vllm.evaluation.presets import chosen
from entropykv_vllm.evaluation.progress import bar, complain, onto
from entropykv_vllm.evaluation.prompts import QUESTION
from entropykv_vllm.help_text import command_parser
from entropykv_vllm.json_file import add_json, show
from entropykv_vllm.option_values import COUNT, LENGTH, SEED, SHARE

# Requests that share a step; results do not depend on it.
TOGETHER = 4


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    p = command_parser("needle", __doc__)
    options.add_model(p)
    options.add_policies(p, engines.POLICIES)
    p.add_argument(
        "--keeps",
        type=words(SHARE),
        default="0.75,0.5,0.25",
        help="shares of the old tokens to keep",
    )
    p.add_argument("--presets", default="", help="presets to measure too, in a bfloat16 cache")
    p.add_argument("--tokens", type=LENGTH, default=2048, help="prompt length")
    p.add_argument("--prompts", "--texts", type=COUNT, default=48, help="prompts a cell")
    p.add_argument(
        "--depths", type=options.depths, default="0,1", help="where needles lie (0,1: all over)"
    )
    options.add_config(p)
    p.add_argument("--seed", type=SEED, default=0, help="of the numbers (default: 0)")
    p.add_argument(
        "--out", type=options.new_folder, metavar="FOLDER", help="default: results/needle-TOKENS"
    )
    add_json(p)
    return p


def check(args: argparse.Namespace) -> None:
    """Refuse a window that the question does not fit into, and prompts too long for the model."""
    chosen(args.presets)
    engines.check_length(args.model, args.tokens, ANSWER_TOKENS, "the answer")
    options.check_settings(
        (policy, engines.eviction(policy, keep, args.tokens, args.config))
        for policy in args.policies
        for keep in args.keeps
    )
    ids = engines.load_tokenizer(args.model).encode(QUESTION, add_special_tokens=False)
    needed, window = len(ids) + ANSWER_TOKENS, args.config.get("window", engines.WINDOW)
    if window < needed:
        raise UsageError(f"the window of {window} tokens must cover the question: {needed} or more")


def spec(args: argparse.Namespace, policy: str, keep: float) -> dict[str, Any]:
    """Return what decides the result of a cell. The pool has room for all requests together."""
    length = args.tokens + ANSWER_TOKENS
    room = pool.pool_bytes(pool.shape(engines.model_folder(args.model)), (TOGETHER + 1) * length)
    return {
        "policy": policy,
        "keep": keep,
        "eviction": {}
        if policy == "none"
        else engines.eviction(policy, keep, args.tokens, args.config),
        "model": args.model,
        **identity.marks(args.model),
        "tokens": args.tokens,
        "prompts": args.prompts,
        "seed": args.seed,
        "depths": args.depths,
        "engine": {
            "max_model_len": length,
            "max_num_seqs": TOGETHER,
            "enforce_eager": True,
            "kv_cache_memory_bytes": room,
        },
    }


def grid(args: argparse.Namespace) -> list[tuple[str, dict[str, Any]]]:
    """Return the cells of policies and keep ratios, by name."""
    return [
        (f"{policy}-{keep:g}", spec(args, policy, keep))
        for policy in args.policies
        for keep in args.keeps
    ]


def presets(args: argparse.Namespace) -> list[tuple[str, dict[str, Any]]]:
    """Return the cells of presets, by name: as they are, and with a cache of 16 bits."""
    found = []
    for name, (policy, eviction) in chosen(args.presets).items():
        cell = spec(args, policy, load(policy, name).keep)
        cell["engine"]["kv_cache_dtype"] = "bfloat16"
        found.append((name, {**cell, "eviction": eviction}))
    return found


def crowded(args: argparse.Namespace) -> list[bool]:
    """Say of each prompt whether its haystack is full of other numbers."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(engines.model_folder(args.model))
    book = corpus.encode(tokenizer)
    cases = prompts.build(tokenizer, book, args.tokens, args.prompts, args.seed, tuple(args.depths))
    return [prompts.among_numbers(tokenizer, case) for case in cases]


def share(result: dict[str, Any], chosen: list[bool]) -> str:
    """Return how many of the chosen prompts were answered exactly, as `3/4`."""
    answers = [a for a, take in zip(result["answers"], chosen, strict=True) if take]
    right = sum(scoring.exact(a["answer"], a["number"]) for a in answers)
    return f"{right}/{len(answers)}"


def label(cell: dict[str, Any]) -> str:
    """Return the name of a cell's row."""
    policy: str = cell.get("eviction", {}).get("preset", cell["policy"])
    return "full cache" if policy == "none" else policy


def rows(results: list[dict[str, Any]], among: list[bool]) -> list[list[str]]:
    """Return the rows of the table; `among` marks the prompts full of other numbers."""
    alone = [not flag for flag in among]
    return [
        [
            label(r["spec"]),
            f"{r['spec']['keep']:g}",
            table.percent(r["held"]),
            table.percent(r["peak"]),
            *(table.interval(r[name]) for name in ("exact", "digits", "form")),
            share(r, alone),
            share(r, among),
        ]
        for r in results
    ]


HEADER = [
    "policy",
    "keep",
    "held %",
    "peak %",
    "exact % (95 %)",
    "digits % (95 %)",
    "form % (95 %)",
    "exact in prose",
    "exact among dates",
]


def measure(args: argparse.Namespace) -> tuple[list[dict[str, Any]], int]:
    """Run all cells, the full cache first; return results, and how many failed and are left out."""
    wanted = [("none-1", spec(args, "none", 1.0)), *grid(args), *presets(args)]
    results = []
    with bar(len(wanted) * args.prompts, "prompt") as shown:
        for i, (name, cell) in enumerate(wanted):
            shown.set_description(name)
            progress = onto(shown, i * args.prompts)
            result = args.out / f"{name}.json"
            try:
                results.append(
                    cells.run("entropykv_vllm.evaluation.needle.cell", cell, result, progress)
                )
            except RunError as error:
                complain(str(error))
            progress(args.prompts, args.prompts)
    return results, len(wanted) - len(results)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    args = parser().parse_args(argv)
    args.out = args.out or Path(f"results/needle-{args.tokens}")
    check(args)
    options.check_out(args.out)
    results, failed = measure(args)
    if not results:
        return 1
    text = table.render(HEADER, rows(results, crowded(args)))
    title = f"needles in {args.tokens} tokens, {args.prompts} prompts a cell"
    (args.out / "table.md").write_text(text + "\n")
    summary = [{k: v for k, v in r.items() if k != "answers"} for r in results]
    (args.out / "table.json").write_text(json.dumps(summary, indent=1) + "\n")
    plot.draw(results, args.out / "exact.png")
    show(f"\n{title}\n\n{text}", summary, args.json)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
