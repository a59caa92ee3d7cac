# SPDX-License-Identifier: Apache-2.0
"""`entropykv eval`: what do eviction and quantization cost on your model and your text?

Facts are hidden in a text and asked for. Offline, all settings get the same keys and values of one
reading; vLLM's engine and any OpenAI-compatible server can be asked the same.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from entropykv_vllm.errors import UsageError
from entropykv_vllm.evaluation import divergence, engines, options
from entropykv_vllm.evaluation.eval import advice, check, plot, rows, run
from entropykv_vllm.evaluation.options import words
from entropykv_vllm.evaluation.tasks import TASKS
from entropykv_vllm.help_text import command_parser
from entropykv_vllm.json_file import add_json, show
from entropykv_vllm.model.fetch import NAME
from entropykv_vllm.option_values import COUNT, LENGTH, SEED, SHARE, Whole

_SO = "(default: %(default)s)"
_TASKS = f"all, or of {', '.join(TASKS)} {_SO}"


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    p = command_parser("eval", __doc__, EPILOG)
    add = p.add_argument
    add("--model", help=f"a model's folder (default: {NAME}, fetched); of an endpoint, its name")
    add("--tokenizer", help="an endpoint's tokenizer: a folder (default: the small model's)")
    add(
        "--backend",
        default="offline",
        help="offline (default), engine, or http://HOST:PORT/v1 of a server with its own cache",
    )
    add("--tasks", type=words(str), default="needle,word,copy", help=_TASKS)
    add(
        "--tokens",
        type=words(LENGTH),
        default="2048",
        help=f"lengths of the context; with --question before, the question included {_SO}",
    )
    add("--depths", type=options.depths, default="0,1", help="where facts lie (0,1: all over)")
    add("--prompts", "--texts", type=COUNT, default=48, help="prompts a cell")
    options.add_text(p)
    add(
        "--policies",
        type=options.policies,
        help="default: entropykv,sink, and none where presets are named",
    )
    add(
        "--keeps",
        type=words(SHARE),
        help="shares of the old tokens to keep (default: 1,0.5,0.25)",
    )
    add("--bits", type=words(Whole(4, 16)), help="bits of the old tokens (default: 16,8,4)")
    add("--presets", default="", help="presets to measure too, as they are")
    add("--config", type=options.settings, default="{}", help="settings for all policies, as JSON")
    add(
        "--question",
        choices=("after", "before"),
        default="after",
        help="read the question after the text was compressed (default), or before",
    )
    add("--kl", action="store_true", help="also compare next-token distributions on plain text")
    add("--seed", type=SEED, default=0, help="of the facts (default: 0)")
    options.add_out(p, "results/eval")
    add_json(p)
    return p


EPILOG = """\
Settings are named by policy, keep ratio and bits: entropykv-0.5-8.

  entropykv eval --tokens 1024 --prompts 8 --policies entropykv --keeps 0.5 --bits 4   a first look
  entropykv eval --model ~/models/mine --text manual.txt --presets balanced,long-context
  entropykv eval --backend http://127.0.0.1:8000/v1
"""


def write(results: list[dict[str, Any]], out: Path, json_file: Path | None) -> None:
    """Write the table, its numbers and its picture, and show what was asked for."""
    text = rows.render(results)
    (out / "table.md").write_text(text + "\n")
    brief = [divergence.brief({k: v for k, v in r.items() if k != "answers"}) for r in results]
    (out / "table.json").write_text(json.dumps(brief, indent=1) + "\n")
    drawn = plot.draw(results, out / "accuracy.png")
    picture = f"\n\npicture: {out / 'accuracy.png'}" if drawn else ""
    show(f"\n{text}{picture}", brief, json_file)
    for sentence in advice.warnings(results):
        print(f"entropykv eval: warning: {sentence}", file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    args = parser().parse_args(argv)
    try:
        check.check(args)
        tokenizer = engines.load_tokenizer(args.tokenizer)
        check.check_text(args, tokenizer)
        wanted = run.groups(args)
        results = run.run(args, tokenizer, wanted)
    except ValueError as error:
        raise UsageError(str(error)) from None
    if not results:
        return 1
    write(results, args.out, args.json)
    return 0 if len(results) == sum(len(group.jobs) for group in wanted) else 1


if __name__ == "__main__":
    raise SystemExit(main())
