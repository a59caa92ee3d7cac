# SPDX-License-Identifier: Apache-2.0
"""`entropykv bench-decode`: how fast are tokens decoded after long prompts?

Each preset and stock vLLM (without the plugin) decode the same prompts with the same model of
random weights, in a pool of as many bytes. Only steps in which all requests of a batch decode
are timed; the time to read the prompts, and the share of it that moving pages takes, stand beside.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from typing import Any

from entropykv_vllm.evaluation import cells, dummy, options, presets, table
from entropykv_vllm.evaluation.decode_cell import PROFILED_STEPS, WARM_UP_STEPS
from entropykv_vllm.evaluation.options import words
from entropykv_vllm.evaluation.progress import bar
from entropykv_vllm.help_text import command_parser
from entropykv_vllm.json_file import add_json, show
from entropykv_vllm.option_values import COUNT, LENGTH, Whole

STOCK = "stock vLLM"

# The layers of SmolLM2-135M, of which the model takes a few.
SMOLLM2 = {"query_heads": 9, "kv_heads": 3, "head_size": 64, "hidden": 576, "mlp": 1536}
SMOLLM2_LAYERS, SMOLLM2_VOCABULARY = 30, 49_152

# Fewer tokens than any setting reads of a request in a step.
STEP_TOKENS = 128


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    p = command_parser("bench-decode", __doc__)
    p.add_argument("--tokens", type=LENGTH, default=8192, help="prompt length")
    p.add_argument("--batches", type=words(COUNT), default="1,4,16", help="requests at a time")
    options.add_presets(p)
    p.add_argument("--steps", type=LENGTH, default=32, help="steps to time")
    p.add_argument("--layers", type=Whole(1, 1024), default=6, help="layers of the model")
    p.add_argument("--repeats", type=COUNT, default=1, help="of all cells")
    p.add_argument("--profile", action="store_true", help="tell where the time of a step goes")
    options.add_out(p, "results/decode")
    add_json(p)
    return p


def settings(args: argparse.Namespace) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return `name -> (policy, eviction settings)` of all that are compared, stock vLLM first."""
    return {STOCK: ("none", {}), **presets.chosen(args.presets)}


def model(args: argparse.Namespace) -> dict[str, Any]:
    """Return the `config.json` of the model.

    The vocabulary shrinks with the layers, so that it takes the share of a step that it has in
    the whole model.
    """
    return dummy.llama(
        **SMOLLM2,
        layers=args.layers,
        vocabulary=math.ceil(SMOLLM2_VOCABULARY * args.layers / SMOLLM2_LAYERS / 64) * 64,
        positions=2 * args.tokens + 4096,
    )


def longest(args: argparse.Namespace, batch: int) -> int:
    """Return a length that no request reaches, though the first answer while the last are read."""
    reading = batch * math.ceil(args.tokens / STEP_TOKENS)
    steps = WARM_UP_STEPS + args.steps + (PROFILED_STEPS if args.profile else 0)
    return min(args.tokens + reading + steps, 2 * args.tokens + 4096)


def spec(
    args: argparse.Namespace, folder: str, name: str, batch: int, repeat: int
) -> dict[str, Any]:
    """Return what decides the result of a cell. The pool has room for full caches."""
    length = longest(args, batch)
    return {
        **dummy.cell(name, settings(args)[name], folder, model(args), args.tokens),
        "batch": batch,
        "steps": args.steps,
        "repeat": repeat,
        **({"profile": True} if args.profile else {}),
        "engine": dummy.engine(folder, length, batch, batch * (length + 128), args.engine),
    }


def turns(names: list[str], batches: list[int], repeats: int) -> list[tuple[int, str, int]]:
    """Return the order of the cells: every other repeat the other way round against drift."""
    return [
        (batch, name, repeat)
        for repeat in range(repeats)
        for batch in batches
        for name in names[:: (-1) ** repeat]
    ]


def median(results: list[dict[str, Any]], batch: int, name: str, value: str) -> float:
    """Return the median of a value over the repeats."""
    return statistics.median(
        r[value] for r in results if (r["spec"]["batch"], r["spec"]["name"]) == (batch, name)
    )


HEADER = [
    "setting",
    "batch",
    "tokens/s",
    "× stock",
    "step in ms",
    "prompts read in s",
    "× stock",
    "moving pages % of it",
]


def rows(results: list[dict[str, Any]]) -> list[list[str]]:
    """Return the rows of the table, batch by batch: medians, and ratios to stock vLLM's."""
    pairs = dict.fromkeys((r["spec"]["batch"], r["spec"]["name"]) for r in results)
    ordered = sorted(pairs, key=lambda pair: (pair[0], pair[1] != STOCK))
    return [_row(results, batch, name) for batch, name in ordered]


def _row(results: list[dict[str, Any]], batch: int, name: str) -> list[str]:
    speed, step, read, moving = (
        median(results, batch, name, value)
        for value in ("tokens/s", "step seconds", "reading seconds", "moving share")
    )
    return [
        name,
        f"{batch}",
        f"{speed:.1f}",
        f"{speed / median(results, batch, STOCK, 'tokens/s'):.2f}",
        f"{1000 * step:.1f}",
        f"{read:.1f}",
        f"{read / median(results, batch, STOCK, 'reading seconds'):.2f}",
        "–" if name == STOCK else f"{100 * moving:.2f}",
    ]


def profile_rows(results: list[dict[str, Any]]) -> list[list[str]]:
    """Return the rows of the profile: milliseconds of a step by part, and their share of it."""
    return [
        [
            result["spec"]["name"],
            f"{result['spec']['batch']}",
            *(
                f"{1000 * seconds:.1f} ({seconds / sum(result['parts'].values()):.0%})"
                for seconds in result["parts"].values()
            ),
        ]
        for result in results
        if "parts" in result
    ]


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run all cells by turns."""
    folder = dummy.write(model(args), (args.out / "model").absolute())
    jobs = bar(turns(list(settings(args)), args.batches, args.repeats), "cell")
    results = []
    for batch, name, repeat in jobs:
        jobs.set_description(f"{name}, batch {batch}")
        results.append(
            cells.run(
                "entropykv_vllm.evaluation.decode_cell",
                spec(args, folder, name, batch, repeat),
                args.out / f"{name.replace(' ', '-')}-{batch}-{repeat}.json",
            )
        )
    return results


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    args = parser().parse_args(argv)
    options.check_settings(settings(args).values())
    options.check_out(args.out)
    results = measure(args)
    title = (
        f"Decoding after prompts of {args.tokens} tokens: {args.layers} layers of SmolLM2-135M, "
        f"bfloat16, median of {args.steps} steps and {args.repeats} repeats"
    )
    text = f"{title}\n\n{table.render(HEADER, rows(results))}"
    if profiled := profile_rows(results):
        heads = ["setting", "batch", *results[0]["parts"]]
        text += f"\n\nms of a step under torch's profiler\n\n{table.render(heads, profiled)}"
    (args.out / "table.md").write_text(text + "\n")
    (args.out / "table.json").write_text(json.dumps(results, indent=1) + "\n")
    show(f"\n{text}", results, args.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
