# SPDX-License-Identifier: Apache-2.0
"""`entropykv bench`: the same load on the same KV memory, without eviction and with it.

Each cache is served in turn by a `vllm serve` of its own, with equally many bytes for pages, and
gets the same long prompts at the same times. A number is hidden in each prompt and asked for at its
end.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
from collections.abc import Sequence
from typing import Any

from entropykv_vllm.evaluation import cells, engines, machine, options, pool, table
from entropykv_vllm.evaluation import presets as named
from entropykv_vllm.evaluation.bench import plot
from entropykv_vllm.evaluation.progress import bar, onto
from entropykv_vllm.help_text import command_parser
from entropykv_vllm.json_file import add_json, show
from entropykv_vllm.option_values import COUNT, LENGTH, Real

STOCK = "vLLM alone"

#: A column, the value under it, its decimals.
COLUMNS = (
    ("tokens/s, all decoding", "tokens a second while all decode", 1),
    ("tokens/s", "tokens a second", 1),
    ("seconds", "seconds", 0),
    ("running", "running at most", 0),
    ("preempted", "preemptions", 0),
)


def parser() -> argparse.ArgumentParser:
    """The command's parser."""
    p = command_parser("bench", __doc__, EPILOG)
    options.add_model(p)
    p.add_argument(
        "--presets",
        default="quality,balanced,long-context,extreme,max",
        help="beside vLLM alone, with commas between them",
    )
    p.add_argument("--requests", type=COUNT, default=32, help="how many")
    p.add_argument("--tokens", type=LENGTH, default=6144, help="of a prompt")
    p.add_argument("--output", type=LENGTH, default=256, help="tokens of an answer")
    p.add_argument(
        "--rate", type=Real(), help="requests a second, at random (default: all at once)"
    )
    p.add_argument(
        "--fit", type=Real(), default=2, help="requests that the pool holds in full (default: 2)"
    )
    p.add_argument("--dtype", default="bfloat16", choices=pool.ITEM_BYTES, help="of all")
    p.add_argument("--repeats", type=COUNT, default=1, help="rounds over all caches")
    p.add_argument(
        "--serve",
        type=shlex.split,
        default=[],
        help="more arguments of vllm serve, for all: --serve='--enforce-eager'",
    )
    options.add_out(p, "results/bench")
    add_json(p)
    return p


EPILOG = """\
A run that was broken off goes on where it stopped.

  entropykv bench --requests 4 --tokens 2048 --output 64 --presets balanced    a first look
  entropykv bench --model /models/mine --fit 4 --rate 0.5 --requests 64
"""


def spec(args: argparse.Namespace, name: str, repeat: int) -> dict[str, Any]:
    """What decides the result of a run."""
    policy, eviction = args.presets.get(name, ("none", {}))
    shape = pool.shape(engines.model_folder(args.model), args.dtype)
    full = round(args.fit * (args.tokens + args.output))
    return {
        "policy": policy,
        "eviction": eviction,
        "model": args.model,
        "requests": args.requests,
        "tokens": args.tokens,
        "output": args.output,
        "rate": args.rate,
        "pool_bytes": pool.pool_bytes(shape, full),
        "dtype": args.dtype,
        "serve": args.serve,
        "repeat": repeat,
    }


def measure(args: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """Run each cache in turn, as often as is wanted: name -> results."""
    names = [STOCK, *args.presets]
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    with bar(len(names) * args.repeats * args.requests, "request") as shown:
        for repeat in range(args.repeats):
            for name in names if repeat % 2 == 0 else names[::-1]:
                shown.set_description(name)
                progress = onto(shown, shown.n)
                path = args.out / f"{name.replace(' ', '-')}-{repeat}.json"
                module = "entropykv_vllm.evaluation.bench.cell"
                found[name].append(cells.run(module, spec(args, name, repeat), path, progress))
                progress(args.requests, args.requests)
    return found


def middle(results: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """One result for a cache: medians of the repeats; what has an interval is the first's."""
    numbers = {
        key: statistics.median(r[key] for r in results)
        for key, value in results[0].items()
        if isinstance(value, int | float) and all(r[key] is not None for r in results)
    }
    return {**results[0], **numbers, "name": name}


def rows(results: list[dict[str, Any]]) -> list[list[str]]:
    """The rows of the table: each value, and in parentheses how many times vLLM's alone."""
    stock = results[0]
    return [
        [
            result["name"],
            *(
                _value(result[key], None if result is stock else stock[key], decimals)
                for _, key, decimals in COLUMNS
            ),
            f"{1 - result['decoding share']:.0%}",
            *(_waits(result[key], scale) for key, scale in WAITS),
            f"{result['pool used at most']:.0%}",
            table.interval(result["exact"]),
        ]
        for result in results
    ]


WAITS = (("seconds to the first token", 1), ("seconds between tokens", 1000))


def _waits(found: dict[str, float | None], scale: float) -> str:
    if found["mean"] is None:
        return "–"
    mean, low, high = (scale * float(found[key] or 0) for key in ("mean", "low", "high"))
    return f"{mean:.3g} ({low:.3g}-{high:.3g})"


def _value(value: float | None, stock: float | None, decimals: int) -> str:
    if value is None:
        return "–"
    ratio = f" ({value / stock:.2f}x)" if stock else ""
    return f"{value:.{decimals}f}{ratio}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    args = parser().parse_args(argv)
    args.presets = named.chosen(args.presets)
    engines.check_length(args.model, args.tokens, args.output, "the answer")
    options.check_out(args.out)
    results = [middle(some, name) for name, some in measure(args).items()]
    heads = [
        "",
        *(head for head, _, _ in COLUMNS),
        "of it reading",
        "to the first, s",
        "between, ms",
        "pool",
        "exact, %",
    ]
    text = table.render(heads, rows(results))
    megabytes = results[0]["spec"]["pool_bytes"] / 2**20
    title = (
        f"{args.requests} requests of {args.tokens}+{args.output} tokens, {args.fit:g} of which "
        f"fit in full into {megabytes:.0f} MiB of pages, in {args.dtype}, "
        f"{'all at once' if args.rate is None else f'{args.rate:g} a second'}; "
        f"in parentheses: times vLLM alone, or 95 % intervals over requests"
    )
    told = {"machine": machine.about([]), "results": results}
    (args.out / "bench.json").write_text(json.dumps(told, indent=1) + "\n")
    (args.out / "bench.md").write_text(text + "\n")
    drawn = plot.draw(results, args.out / "bench.png")
    picture = f"\n\npicture: {args.out / 'bench.png'}" if drawn else ""
    show(f"\n{title}\n\n{text}{picture}", told, args.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
