# SPDX-License-Identifier: Apache-2.0
"""`entropykv tune`: find the least memory that still answers right, on your model and your text.

Numbers are hidden in the text and asked for. All settings answer the first few texts; those that
cannot reach the target any more are given up, and the rest go on.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from entropykv_vllm.config.settings import load
from entropykv_vllm.errors import UsageError
from entropykv_vllm.evaluation import options, scoring, table
from entropykv_vllm.evaluation.calibration import check
from entropykv_vllm.evaluation.tune import choice, files, plot
from entropykv_vllm.evaluation.tune.race import Standing, hopeful, race
from entropykv_vllm.help_text import command_parser
from entropykv_vllm.json_file import add_json, show
from entropykv_vllm.option_values import COUNT, LENGTH, SEED, SHARE, Whole

#: How far below the target the 95 % interval of right answers to all texts may reach.
SLACK = 0.15


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    p = command_parser("tune", __doc__, EPILOG)
    options.add_model_argument(p)
    p.add_argument(
        "--target-accuracy",
        type=SHARE,
        default=0.98,
        metavar="SHARE",
        help="share of the full cache's right answers to keep (default: %(default)s)",
    )
    options.add_text(p)
    p.add_argument("--tokens", type=LENGTH, default=2048, help="context length (default: 2048)")
    p.add_argument("--texts", "--prompts", type=COUNT, default=24, help="how many")
    p.add_argument(
        "--windows",
        type=options.words(Whole(check.LEAST_WINDOW)),
        default="256,64",
        help="recency windows to try (default: %(default)s)",
    )
    p.add_argument("--profile", help="of a calibration (default: layers are scanned)")
    p.add_argument("--seed", type=SEED, default=0, help="of the numbers (default: 0)")
    options.add_out(p, "results/tune/MODEL")
    add_json(p)
    return p


EPILOG = """\
A run that was broken off goes on where it stopped. Exit status 1: nothing reaches the target.

  entropykv tune                                       the small model, English prose
  entropykv tune MODEL --text mine.txt --tokens 4096 --target-accuracy 0.95
"""


def warning(texts: int, target: float) -> str | None:
    """Say that even right answers to all texts would not mean much, if so."""
    low, high = scoring.wilson(texts, texts)
    if low >= target - SLACK:
        return None
    return (
        f"--texts {texts} says little about {table.percent(target)} %: all answered right are "
        f"{table.interval([1.0, low, high])} % of what your text may ask, so take more"
    )


def conclude(args: argparse.Namespace, net: Any, found: Sequence[Standing]) -> int:
    """Write what was found, and show it; return the exit status."""
    left = [one.mean() for one in hopeful(found, args.target_accuracy)]
    names = {one.cell.name for one in left}
    given_up = [one for one in found if one.cell.name not in names]
    winner = choice.best(left, args.target_accuracy)
    report = choice.report(left, winner, given_up)
    made = None
    if winner is not None:
        config = net.net.config.get_text_config()
        made = files.write(args.out, config, args.model, winner)
        report |= {"file": str(made.settings), "server": str(made.server)}
    text = table.render(choice.HEADER, choice.rows(left, args.texts))
    (args.out / "table.md").write_text(text + "\n")
    (args.out / "table.json").write_text(json.dumps(report, indent=1) + "\n")
    picture = args.out / "right.png"
    drawn = plot.draw(found, winner, args.target_accuracy, picture)
    parts = [
        f"{len(left) - 1} of {len(found) - 1} settings may still reach the target after all texts "
        f"({args.texts} of {args.tokens:,} tokens); the others were given up on the way",
        text,
        *([f"picture: {picture}"] if drawn else []),
        files.advice(winner, made),
    ]
    show("\n" + "\n\n".join(parts), report, args.json)
    return 0 if winner else 1


def _check_profile(name: str) -> None:
    try:
        load("entropykv", name)
    except ValueError as error:
        raise UsageError(f"--profile: {error}") from None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    args = parser().parse_args(argv)
    if args.profile:
        _check_profile(args.profile)
    check.check(args, "tune")
    if sentence := warning(args.texts, args.target_accuracy):
        print(f"entropykv tune: warning: {sentence}", file=sys.stderr)
    try:
        net, found = race(args)
    except ValueError as error:
        raise UsageError(str(error)) from None
    return conclude(args, net, found)


if __name__ == "__main__":
    raise SystemExit(main())
