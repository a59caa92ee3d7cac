# SPDX-License-Identifier: Apache-2.0
"""`entropykv bench-overhead`: what does the planner add to a step that decodes?

vLLM alone and each preset decode the same prompts, each in a process of its own that holds vLLM's
engine. The parts of each step in which the planner has a hand are timed: the scheduler, the table
rows, the metadata of attention, the runner around the model, the statistics.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from entropykv_vllm.evaluation import cells, engines, machine, options, pool, presets, table
from entropykv_vllm.evaluation.bench_overhead import summary
from entropykv_vllm.evaluation.bench_overhead.cell import PROFILED_STEPS, SPREAD, WARM_UP_STEPS
from entropykv_vllm.evaluation.bench_overhead.parts import CLOCKS, PLANNER
from entropykv_vllm.evaluation.progress import bar
from entropykv_vllm.help_text import command_parser
from entropykv_vllm.json_file import add_json, show
from entropykv_vllm.option_values import COUNT, LENGTH, Whole

STOCK = "vLLM alone"

#: Seconds of a step on a GPU: not measured, but assumed.
GPU_STEP = 0.01

#: Tokens of a request, besides its prompt and the steps: what it decodes while others are read.
SLACK = 256


def parser() -> argparse.ArgumentParser:
    """The command's parser."""
    p = command_parser("bench-overhead", __doc__)
    options.add_model(p)
    options.add_presets(p)
    p.add_argument("--requests", type=COUNT, default=64, help="that decode")
    p.add_argument("--tokens", type=Whole(SPREAD, LENGTH.most), default=2000, help="of a prompt")
    p.add_argument("--steps", type=LENGTH, default=512, help="to time")
    p.add_argument("--clock", choices=CLOCKS, default="processor", help="which time is taken")
    p.add_argument(
        "--without-model",
        action="store_true",
        help="leave the model out, as if another device computed it: minutes instead of hours",
    )
    options.add_out(p, "results/overhead")
    add_json(p)
    return p


def length(args: argparse.Namespace) -> int:
    """Tokens that a request has room for."""
    steps = args.steps + WARM_UP_STEPS + PROFILED_STEPS
    return int(args.tokens + SPREAD + steps + SLACK)


def spec(args: argparse.Namespace, setting: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    """What decides the result of a run. The pool has room for full caches."""
    policy, eviction = setting
    shape = pool.shape(engines.model_folder(args.model), "bfloat16")
    engine = {
        "dtype": "bfloat16",
        "enable_prefix_caching": True,  # as a server has it
        "max_model_len": length(args),
        "max_num_seqs": args.requests,
        "kv_cache_memory_bytes": pool.pool_bytes(shape, args.requests * length(args)),
        "enforce_eager": args.without_model,
        **args.engine,
    }
    return {
        "policy": policy,
        "eviction": eviction,
        "model": args.model,
        "requests": args.requests,
        "tokens": args.tokens,
        "steps": args.steps,
        "clock": args.clock,
        "computed": not args.without_model,
        "engine": engine,
    }


def measure(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Run each setting: name -> result."""
    settings = {STOCK: ("none", {}), **args.presets}
    found, jobs = {}, bar(settings.items(), "cell")
    for name, setting in jobs:
        jobs.set_description(name)
        path = args.out / f"{name.replace(' ', '-')}.json"
        module = "entropykv_vllm.evaluation.bench_overhead.cell"
        found[name] = cells.run(module, spec(args, setting), path)
    return found


def report(results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What is told of each setting, by its name: seconds a step, and the profile."""
    stock = results[STOCK]["steps"]
    return {
        name: {
            "spec": result["spec"],
            "medians": summary.medians(result["steps"]),
            "means": summary.means(result["steps"]),
            "added": None if name == STOCK else summary.added(result["steps"], stock),
            "hottest": result["hottest"],
        }
        for name, result in results.items()
    }


COSTS = ["mean µs a step", *PLANNER, "moves' kernels", "whole step, ms"]
SHARES = ["setting", "median, µs", "mean, µs", "% of a step of vLLM alone", "% of 10 ms"]


def costs(told: dict[str, Any]) -> list[list[str]]:
    """The rows of the table of parts."""
    return [
        [
            name,
            *(f"{1e6 * one['means'][part][0]:.0f}" for part in (*PLANNER, "moves")),
            f"{1e3 * one['means']['step'][0]:.1f}",
        ]
        for name, one in told.items()
    ]


def shares(told: dict[str, Any]) -> list[list[str]]:
    """The rows of the table of what is added."""
    step = told[STOCK]["means"]["step"][0] if told[STOCK]["spec"]["computed"] else None
    return [
        [
            name,
            *(_interval(one["added"][kind], 1e6, 0) for kind in ("median", "mean")),
            "–" if step is None else _interval(one["added"]["mean"], 100 / step, 2),
            _interval(one["added"]["mean"], 100 / GPU_STEP, 1),
        ]
        for name, one in told.items()
        if name != STOCK
    ]


def _interval(estimate: list[float], scale: float, decimals: int) -> str:
    value, low, high = (f"{scale * x:.{decimals}f}" for x in estimate)
    return f"{value} ({low} to {high})"


def profile(told: dict[str, Any]) -> str:
    """The table of the functions that take most, under the setting that adds most."""
    dearest = max((name for name in told if name != STOCK), key=lambda name: _mean(told[name]))
    return table.render(
        [f"{dearest}, under a profiler", "µs a step", "calls a step"],
        [
            [one["function"], f"{one['µs a step']:.0f}", f"{one['calls a step']:.1f}"]
            for one in told[dearest]["hottest"]
        ],
    )


def _mean(one: dict[str, Any]) -> float:
    return float(one["added"]["mean"][0])


def text(args: argparse.Namespace, told: dict[str, Any]) -> str:
    """What people read: the parts, what is added, and the profile."""
    title = (
        f"{args.requests} requests of about {args.tokens} tokens decode, {args.steps} steps, "
        f"{args.clock} time of the engine's thread"
    )
    found = [title, table.render(COSTS, costs(told))]
    if len(told) > 1:
        found += [
            "What the planner adds to a step, with 95 % intervals over steps. That a GPU takes "
            "10 ms for one is assumed, not measured:",
            table.render(SHARES, shares(told)),
            profile(told),
        ]
    return "\n\n".join(found)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    args = parser().parse_args(argv)
    args.presets = presets.chosen(args.presets)
    more = SPREAD + args.steps + WARM_UP_STEPS + PROFILED_STEPS + SLACK
    engines.check_length(args.model, args.tokens, more, "the steps")
    options.check_out(args.out)
    told = report(measure(args))
    shown = text(args, told)
    (args.out / "table.md").write_text(shown + "\n")
    whole = {"machine": machine.about([]), "settings": told}
    (args.out / "table.json").write_text(json.dumps(whole, indent=1) + "\n")
    show(f"\n{shown}", whole, args.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
