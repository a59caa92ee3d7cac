# SPDX-License-Identifier: Apache-2.0
"""The flags of `entropykv simulate`; those that `entropykv plan` has as well mean the same."""

from __future__ import annotations

import argparse
from pathlib import Path

from entropykv_vllm.config.presets import PRESETS
from entropykv_vllm.help_text import Help
from entropykv_vllm.json_file import add_json
from entropykv_vllm.plan.flags import add_numbers, add_server, add_settings
from entropykv_vllm.plan.weights import BYTES
from entropykv_vllm.simulation.router import ROUTERS
from entropykv_vllm.simulation.synthetic import Synthetic
from entropykv_vllm.simulation.trace import MOST

EPILOG = """\
In parentheses: what it is if the option is left out. Single settings are --config.NAME VALUE.

  entropykv simulate --model Qwen/Qwen2.5-7B-Instruct --gpu 24GB --replicas 2 \\
      --synthetic 'requests=500 prompt=6k output=256 rate=2 shared=1k'
  entropykv simulate --model Qwen/Qwen2.5-7B-Instruct --trace AzureLLMInferenceTrace_conv.csv
"""


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    parser = argparse.ArgumentParser(
        prog="entropykv simulate",
        description="Replay a trace of requests against servers that are not there: what a card "
        "answers, what waits, what is preempted and what the prefix cache finds, with vLLM's full "
        "cache and with each preset. Needs no weights, no GPU and no vLLM.",
        epilog=EPILOG,
        formatter_class=Help,
        allow_abbrev=False,
    )
    _add_trace(parser.add_argument_group("the trace"))
    _add_questions(parser.add_argument_group("what to simulate"))
    _add_times(parser.add_argument_group("how long a step takes, which is a model"))
    add_settings(parser.add_argument_group("settings of the cache"))
    server = parser.add_argument_group("flags of the server, as vLLM has them")
    add_server(server)
    _add_server(server)
    add_numbers(parser.add_argument_group("numbers of the model, where its config.json has not"))
    parser.set_defaults(tokens=None, answer=None, tiers=False)
    return parser


def _add_trace(group: argparse._ArgumentGroup) -> None:
    add, usual = group.add_argument, Synthetic()
    add("--trace", type=Path, metavar="FILE", help="Azure's CSV or Mooncake's JSONL")
    add(
        "--synthetic",
        metavar="NUMBERS",
        help="a trace made up from "
        + " ".join(f"{name}={value:g}" for name, value in vars(usual).items())
        + ", any of them",
    )
    add("--requests", type=int, metavar="N", help="only the first requests (all)")
    add("--speed", type=float, default=1.0, metavar="X", help="they come X times as fast (1)")


def _add_questions(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--model", help="a folder, a config.json, or a name such as Qwen/Qwen2.5-7B-Instruct")
    add("--gpu", metavar="SIZE", help="the card of each replica: 8GB, 24GiB (24GB)")
    add("--replicas", type=int, default=1, metavar="N", help="servers (%(default)s)")
    add(
        "--router",
        choices=ROUTERS,
        default="least-loaded",
        metavar="NAME",
        help=f"who gets a request: {', '.join(ROUTERS)} (%(default)s)",
    )
    add(
        "--preset",
        choices=PRESETS,
        action="extend",
        nargs="+",
        metavar="NAME",
        help=f"beside the full cache: {', '.join(PRESETS)} (all)",
    )
    add(
        "--weights",
        metavar="HOW",
        help=f"stored as {', '.join(BYTES)}, or an amount such as 5.6GB (the model's)",
    )
    add_json(group)
    add("--quiet", action="store_true", help="no progress bar")


def _add_times(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--prefill-rate", type=float, metavar="N", help="tokens of prompts a second (the card's)")
    add("--step-ms", type=float, metavar="MS", help="a step without its pages (the card's)")
    add("--bandwidth", metavar="SIZE", help="pages read in a second: 800GB (the card's)")
    add("--steps", action="store_true", help="count steps, not seconds; all requests come at once")


def _add_server(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--max-model-len", metavar="TOKENS", help="longest request (what the model reads and fits)")
    add(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="find pages of prompts that begin alike (yes)",
    )
    add(
        "--async-scheduling",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="plan a step while the one before it runs, which vLLM does on GPUs (yes)",
    )


def check(args: argparse.Namespace) -> None:
    """Refuse numbers that cannot be.

    Raises:
        ValueError: one sentence that says what to do.
    """
    if (args.trace is None) == (args.synthetic is None):
        raise ValueError("name one trace: a file with --trace, or numbers with --synthetic")
    if args.model is None and args.kv_heads is None:
        raise ValueError("name a model with --model, or give its numbers")
    for name in ("replicas", "requests", "speed", "prefill_rate", "step_ms"):
        _check_number(f"--{name.replace('_', '-')}", getattr(args, name))
    if args.gpu is not None and ("," in args.gpu or args.gpu == "all"):
        raise ValueError(f"--gpu is {args.gpu}: give the one card that each replica has")


def _check_number(flag: str, value: float | None) -> None:
    if value is None:
        return
    if value <= 0:
        raise ValueError(f"{flag} is {value}: it must be more than 0")
    if not 1 / MOST <= value <= MOST:
        raise ValueError(f"{flag} is {value}: it must be a number from {1 / MOST:g} to {MOST:g}")
