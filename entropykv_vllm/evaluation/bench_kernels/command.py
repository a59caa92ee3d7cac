# SPDX-License-Identifier: Apache-2.0
"""`entropykv bench-kernels`: how fast are our kernels for CPUs, next to vLLM's?

Both read the same numbers of tokens in one process, call by call by turns, with the same threads
and the same kind of memory pages. Pools are larger than the caches, and each call reads other
shuffled pages, so keys and values come from memory. vLLM's better page size counts.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from entropykv_vllm.errors import RunError
from entropykv_vllm.evaluation import cells, machine, options
from entropykv_vllm.evaluation.bench_kernels import plot, rows
from entropykv_vllm.evaluation.bench_kernels.shapes import FORMATS, Shape, cases
from entropykv_vllm.evaluation.progress import bar, onto
from entropykv_vllm.help_text import command_parser
from entropykv_vllm.json_file import add_json, show
from entropykv_vllm.option_values import COUNT, LENGTH, Real, Whole

PARTS = ("decode", "prefill", "collapse")

# What --quick changes of the defaults: it shows that everything runs, not how fast.
QUICK = {
    "shapes": ["9/3/64"],
    "sequences": [1],
    "tokens": [1024],
    "contexts": [0, 512],
    "queries": 128,
    "collapse_context": 512,
    "threads": [1],
    "huge_pages": "on",
    "megabytes": 16.0,
    "read_megabytes": 32.0,
    "seconds": 0.05,
    "rounds": 2,
}


def shapes(text: str) -> list[str]:
    """Read head shapes, separated by commas."""
    try:
        return [str(Shape.parse(part)) for part in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def parts(text: str) -> list[str]:
    """Read names of parts of the benchmark."""
    found = text.split(",")
    if wrong := set(found) - set(PARTS):
        raise argparse.ArgumentTypeError(f"no part of {', '.join(PARTS)}: {', '.join(wrong)}")
    return found


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    p = command_parser("bench-kernels", __doc__)
    p.add_argument("--quick", action="store_true", help="few small cases, to see that it runs")
    p.add_argument(
        "--only", type=parts, default=list(PARTS), help=f"of {','.join(PARTS)} (default: all)"
    )
    p.add_argument(
        "--shapes",
        type=shapes,
        default=["9/3/64", "32/8/128", "28/4/128"],
        help="query heads/KV heads/head size (default: 9/3/64,32/8/128,28/4/128)",
    )
    p.add_argument("--threads", type=options.words(Whole(1, 1024)), default="1,2", help="of a run")
    p.add_argument(
        "--huge-pages", choices=("on", "off", "both"), default="both", help="under the pools"
    )
    p.add_argument("--seconds", type=Real(), default=2.0, help="for a case")
    p.add_argument("--rounds", type=COUNT, default=5, help="at least, for a case")
    add_sizes(p)
    p.add_argument(
        "--out",
        type=options.new_folder,
        default=Path("results/kernels"),
        metavar="FOLDER",
        help="folder of the results",
    )
    add_json(p)
    return p


def add_sizes(p: argparse.ArgumentParser) -> None:
    """Add the options that say how much is read."""
    p.add_argument("--sequences", type=options.words(COUNT), default="1,4,16", help="of a step")
    p.add_argument(
        "--tokens",
        type=options.words(LENGTH),
        default="4096,8192,32768",
        help="of a sequence in decode",
    )
    p.add_argument("--queries", type=LENGTH, default=2048, help="of a prefill")
    p.add_argument(
        "--contexts",
        type=options.words(Whole(0, LENGTH.most)),
        default="0,4096,16384",
        help="tokens before a prefill",
    )
    p.add_argument(
        "--collapse-context",
        type=LENGTH,
        default=4096,
        help="tokens before the prefill that a collapse is a share of (default: 4096)",
    )
    p.add_argument("--megabytes", type=Real(), default=400.0, help="of a pool")
    p.add_argument(
        "--memory",
        type=Real(),
        default=2.0,
        help="leave out cases whose 16-bit pages take more GB (default: 2)",
    )
    p.add_argument(
        "--read-megabytes",
        type=Real(),
        default=512.0,
        help="of the tensor whose sum shows how fast memory is read (default: 512)",
    )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the arguments; those that are given count over what --quick changes."""
    p = parser()
    if p.parse_args(argv).quick:
        p.set_defaults(**QUICK)
    return p.parse_args(argv)


def runs(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the specifications of all runs. A collapse is measured on one thread only."""
    by_threads = {n: [part for part in args.only if part != "collapse"] for n in args.threads}
    if "collapse" in args.only:
        by_threads.setdefault(1, []).append("collapse")
    return [
        spec(args, threads, which, pages == "on")
        for threads, which in by_threads.items()
        for pages in ("on", "off")
        if which and args.huge_pages in (pages, "both")
    ]


def spec(args: argparse.Namespace, threads: int, which: list[str], huge: bool) -> dict[str, Any]:
    """Return what decides the result of a run, a process of its own."""
    kept = ("shapes", "sequences", "tokens", "queries", "contexts", "collapse_context")
    limits = ("megabytes", "memory", "read_megabytes", "seconds", "rounds")
    return {
        "policy": "none",  # vLLM without our plugin: only its kernels are needed
        "threads": threads,
        "huge": huge,
        "parts": which,
        **{name: getattr(args, name) for name in kept + limits},
    }


def count(run: dict[str, Any]) -> int:
    """Return how many measurements a run consists of."""
    collapses = len(run["shapes"]) * len(FORMATS) if "collapse" in run["parts"] else 0
    return len(cases(run)[0]) + collapses


def measure(todo: list[dict[str, Any]], out: Path) -> list[dict[str, Any]]:
    """Run all runs, one after the other; none is taken from an earlier time."""
    results = []
    with bar(sum(map(count, todo)), "case") as shown:
        for run in todo:
            name = f"{run['threads']}-{'huge' if run['huge'] else 'small'}"
            shown.set_description(name)
            progress = onto(shown, shown.n)
            result = out / f"{name}.json"
            result.unlink(missing_ok=True)
            settings = {
                "OMP_NUM_THREADS": str(run["threads"]),
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            }
            module = "entropykv_vllm.evaluation.bench_kernels.cell"
            results.append(cells.run(module, run, result, progress, settings))
    return results


def notes(args: argparse.Namespace, todo: list[dict[str, Any]]) -> list[str]:
    """Return what a reader should know of what was left out, and of pools too small."""
    left_out = {case: None for run in todo for case in cases(run)[1]}
    lines = [
        f"Left out, as its 16-bit pages take {case.total_bytes / 1e9:.1f} GB: {case.part} of "
        f"{case.shape}, {case.sequences} × {case.tokens:,} tokens (see --memory)."
        for case in left_out
    ]
    if args.megabytes * 1e6 < 4 * machine.last_level_cache():
        lines.append(
            f"Pools of {args.megabytes:g} MB are less than four times the last-level cache: "
            "not all reads come from memory (see --megabytes)."
        )
    return lines


def report(results: list[dict[str, Any]], lines: list[str], args: argparse.Namespace) -> None:
    """Write the tables, all numbers and the picture, and show what was asked for."""
    text = "\n\n".join([*rows.tables(results), *lines])
    (args.out / "table.md").write_text(text + "\n")
    arguments = {**vars(args), "out": str(args.out)}
    del arguments["json"]
    everything = {"arguments": arguments, "notes": lines, "runs": results}
    (args.out / "kernels.json").write_text(json.dumps(everything, indent=1) + "\n")
    plot.draw(results, args.out / "decode.png")
    show(f"\n{text}", everything, args.json)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    args = parse(argv)
    from entropykv_vllm.kernels import native

    if not native.load():
        raise RunError("this package was built without its native kernels")
    options.check_out(args.out)
    todo = runs(args)
    report(measure(todo, args.out), notes(args, todo), args)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
