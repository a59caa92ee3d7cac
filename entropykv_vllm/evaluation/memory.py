# SPDX-License-Identifier: Apache-2.0
"""`entropykv memory`: the KV memory that a request takes, counted by vLLM's page pool.

A model of random weights and real attention shape reads one prompt and decodes, and after each
step the pages in use are read from vLLM's gauge. Nothing here comes from a plan but the column
that says so, against which the measured peak is checked.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from entropykv_vllm.errors import RunError, UsageError
from entropykv_vllm.evaluation import cells, dummy, options, presets, table
from entropykv_vllm.evaluation.options import words
from entropykv_vllm.evaluation.progress import bar, complain
from entropykv_vllm.help_text import command_parser
from entropykv_vllm.json_file import add_json, show
from entropykv_vllm.option_values import LENGTH, SHARE, Whole

# Settings of the grid besides keep and bits. The segment is whole pages of any bits, so all hold
# equally many new tokens, and only what is left of the old ones differs.
GRID = {"window": 256, "segment": 448, "interval": 448}
VOCABULARY = 512
WIDTH = Whole(1, 4096)
POSITIONS = 40_960
HIDDEN = 256  # small: pages do not depend on it


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    p = command_parser("memory", __doc__)
    p.add_argument(
        "--tokens", type=words(Whole(1, POSITIONS)), default="8192,32768", help="prompt lengths"
    )
    p.add_argument("--decode", type=LENGTH, default=512, help="tokens to decode")
    options.add_presets(p)
    p.add_argument(
        "--grid",
        type=grid,
        default="1,0.5,0.25x16,8,4",
        help="KEEPSxBITS (default: %(default)s); '' for none",
    )
    p.add_argument("--layers", type=WIDTH, default=2, help="of the model")
    p.add_argument("--kv-heads", type=WIDTH, default=8, help="of a layer")
    p.add_argument(
        "--query-heads", type=WIDTH, default=32, help="fewer are faster, in equal memory"
    )
    p.add_argument("--head-size", type=WIDTH, default=128, help="channels of a head")
    options.add_out(p, "results/memory")
    add_json(p)
    return p


def grid(text: str) -> list[tuple[float, int]]:
    """Return the pairs of keep ratio and bits of a text such as `1,0.5x16,4`."""
    if not text:
        return []
    keeps, _, bits = text.partition("x")
    read = options.words(SHARE), options.words(Whole(4, 16))
    return [(keep, number) for keep in read[0](keeps) for number in read[1](bits)]


def check(args: argparse.Namespace) -> None:
    """Refuse settings that are wrong, a shape that cannot be, and more tokens than are read.

    Raises:
        UsageError: one sentence that says what is wrong.
    """
    options.check_settings(settings(args).values())
    if args.query_heads % args.kv_heads:
        raise UsageError(f"{args.query_heads} query heads are no multiple of {args.kv_heads}")
    if not args.tokens or max(args.tokens) + args.decode + 2 > POSITIONS:
        raise UsageError(f"--tokens and --decode are more than {POSITIONS:,} together, or none")


def settings(args: argparse.Namespace) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return `name -> (policy, eviction settings)` of all rows: presets, then the grid."""
    return presets.chosen(args.presets) | {
        f"keep {keep:g}, {bits} bits": ("entropykv", {**GRID, "keep": keep, "bits": bits})
        for keep, bits in args.grid
    }


def model(args: argparse.Namespace) -> dict[str, Any]:
    """Return the `config.json` of the model."""
    return dummy.llama(
        layers=args.layers,
        query_heads=args.query_heads,
        kv_heads=args.kv_heads,
        head_size=args.head_size,
        hidden=HIDDEN,
        mlp=HIDDEN,
        vocabulary=VOCABULARY,
        positions=POSITIONS,
    )


def spec(args: argparse.Namespace, folder: str, name: str, tokens: int) -> dict[str, Any]:
    """Return what decides the result of a cell. The pool has room for a full cache."""
    length = tokens + args.decode + 2  # see memory_cell
    return {
        **dummy.cell(name, settings(args)[name], folder, model(args), tokens),
        "decode": args.decode,
        "engine": dummy.engine(folder, length, 1, length, {"enforce_eager": True, **args.engine}),
    }


HEADER = [
    "setting",
    "tokens",
    "after the prompt %",
    "mean of decoding %",
    "peak %",
    "times smaller",
    "bytes a token",
    "peak pages",
    "planned",
]


def rows(results: list[dict[str, Any]]) -> list[list[str]]:
    """Return the rows of the table, in percent of a full cache of 16 bits."""
    return [
        [
            r["spec"]["name"],
            f"{r['spec']['tokens']}",
            *(f"{100 * r[part]['ratio']:.1f}" for part in ("prompt", "decode", "peak")),
            f"{1 / r['decode']['ratio']:.2f}",
            f"{r['decode']['bytes a token']:.0f}",
            f"{r['peak']['pages']}",
            f"{r['planned peak pages']}",
        ]
        for r in results
    ]


GRID_TITLE = (
    "Evicted and then quantized, mean of decoding. The newest tokens are neither, so both effects "
    "multiply for what is older: see what is added from one length to another"
)
GRID_HEADER = ["keep", "bits", "tokens", "measured %", "product of both alone %", "times smaller"]


def grid_ratios(results: list[dict[str, Any]]) -> dict[tuple[float, int, str], float]:
    """Return the share of a full cache by keep, bits and tokens.

    With several lengths, also of what the longest adds to the shortest: there the newest tokens,
    which are neither evicted nor quantized, do not count.
    """
    of: dict[tuple[float, int], list[dict[str, Any]]] = {}
    for r in results:
        if "preset" not in (eviction := r["spec"]["eviction"]):
            of.setdefault((eviction["keep"], eviction["bits"]), []).append(r)
    ratios = {
        (*pair, str(r["spec"]["tokens"])): r["decode"]["ratio"] for pair in of for r in of[pair]
    }
    return ratios | {
        (*pair, f"{some[0]['spec']['tokens']} to {some[-1]['spec']['tokens']}"): added(some)
        for pair, some in of.items()
        if len(some) > 1
    }


def added(results: list[dict[str, Any]]) -> float:
    """Return what each token from the first length to the last takes, over a full token's bytes."""
    first, last = results[0], results[-1]
    held = last["decode"]["bytes"] - first["decode"]["bytes"]
    tokens = last["spec"]["tokens"] - first["spec"]["tokens"]
    return held / (tokens * first["token bytes of a full cache"])


def grid_rows(results: list[dict[str, Any]]) -> list[list[str]]:
    """Return the rows of the grid: eviction and quantization together, and each one alone."""
    ratios = grid_ratios(results)
    return [
        [
            f"{keep:g}",
            f"{bits}",
            tokens,
            f"{100 * ratio:.1f}",
            product(ratios.get((keep, 16, tokens)), ratios.get((1.0, bits, tokens))),
            f"{1 / ratio:.2f}" if ratio > 0 else "–",
        ]
        for (keep, bits, tokens), ratio in ratios.items()
    ]


def product(evicted: float | None, quantized: float | None) -> str:
    """Return the product of the two single effects in percent, if both were measured."""
    return "–" if evicted is None or quantized is None else f"{100 * evicted * quantized:.1f}"


def measure(args: argparse.Namespace) -> tuple[list[dict[str, Any]], int]:
    """Run all cells; return the results and how many failed, which are reported."""
    folder = dummy.write(model(args), (args.out / "model").absolute())
    results, failed = [], 0
    jobs = bar([(name, n) for n in sorted(args.tokens) for name in settings(args)], "cell")
    for name, tokens in jobs:
        jobs.set_description(f"{name}, {tokens}")
        slug = f"{name.replace(', ', '-').replace(' ', '')}-{tokens}.json"
        cell = spec(args, folder, name, tokens)
        try:
            results.append(
                cells.run("entropykv_vllm.evaluation.memory_cell", cell, args.out / slug)
            )
        except RunError as error:
            complain(str(error))
            failed += 1
    return results, failed


def report(args: argparse.Namespace, results: list[dict[str, Any]]) -> str:
    """Return what is printed and kept: the table of all settings and that of the grid."""
    parts = [
        f"KV pages of one request, {args.layers} layers of {args.kv_heads} KV heads of "
        f"{args.head_size}, bfloat16, {args.decode} tokens decoded; in % of a full cache of 16 "
        "bits of the same tokens",
        table.render(HEADER, rows(results)),
    ]
    if lines := grid_rows(results):
        parts += [GRID_TITLE, table.render(GRID_HEADER, lines)]
    return "\n\n".join(parts)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    args = parser().parse_args(argv)
    check(args)
    options.check_out(args.out)
    results, failed = measure(args)
    if not results:
        return 1
    text = report(args, results)
    (args.out / "table.md").write_text(text + "\n")
    summary = [{k: v for k, v in r.items() if k != "pages of each step"} for r in results]
    (args.out / "table.json").write_text(json.dumps(summary, indent=1) + "\n")
    show(f"\n{text}", summary, args.json)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
