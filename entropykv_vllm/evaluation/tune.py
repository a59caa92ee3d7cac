# SPDX-License-Identifier: Apache-2.0
"""`entropykv tune`: the least memory that still answers right, on your model and your text.

Numbers are hidden in the text and asked for. All settings answer the first few texts; those that
cannot reach the target any more are given up, and the rest go on.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from entropykv_vllm.config.profile import fingerprint
from entropykv_vllm.config.settings import load
from entropykv_vllm.errors import RunError, UsageError
from entropykv_vllm.evaluation import calibrate, engines, options, scoring, table
from entropykv_vllm.evaluation.calibration import allocation, check, profile, scan, search
from entropykv_vllm.evaluation.calibration.run import Summary, Texts, run
from entropykv_vllm.evaluation.offline.cell import Cell
from entropykv_vllm.evaluation.progress import onto
from entropykv_vllm.json_file import add_json, show
from entropykv_vllm.model.fetch import NAME

#: How far below the target the 95 % interval of right answers to all texts may reach.
SLACK = 0.15
#: The share of texts that the full cache must answer right: else nothing can be seen to be lost.
ENOUGH = 0.5


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    p = argparse.ArgumentParser(prog="entropykv tune", description=(__doc__ or "").split("\n")[0])
    p.add_argument(
        "model", nargs="?", default=NAME, help="a model's folder (default: %(default)s, fetched)"
    )
    p.add_argument(
        "--target-accuracy",
        type=float,
        default=0.98,
        help="share of the full cache's right answers to keep (default: %(default)s)",
    )
    p.add_argument("--text", type=Path, help="your own text, if not that of the package")
    p.add_argument("--tokens", type=int, default=2048, help="context length (default: 2048)")
    p.add_argument("--texts", type=int, default=24, help="default: %(default)s")
    p.add_argument(
        "--windows", type=_windows, default="256,64", help="recency windows to try (%(default)s)"
    )
    p.add_argument("--profile", help="of a calibration; without it layers are scanned")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--out", type=Path, help="folder of the results (default: results/tune/...)")
    add_json(p)
    return p


def _windows(text: str) -> list[int]:
    """Windows that a question and its answer fit into."""
    found = options.words(int)(text)
    if not found:
        raise argparse.ArgumentTypeError("name one window or more")
    if min(found) < check.LEAST_WINDOW:
        raise argparse.ArgumentTypeError(
            f"windows must hold the question: {check.LEAST_WINDOW} or more"
        )
    return found


def warning(texts: int, target: float) -> str | None:
    """Say that even right answers to all texts would not mean much, if so."""
    low, high = scoring.wilson(texts, texts)
    if low >= target - SLACK:
        return None
    return (
        f"--texts {texts} says little about {table.percent(target)} %: all answered right are "
        f"{table.interval([1.0, low, high])} % of what your text may ask, so take more"
    )


def rounds(texts: int) -> list[int]:
    """How many texts have been answered at the end of each round."""
    found = [texts]
    while found[0] > 4:
        found.insert(0, found[0] // 2)
    return found


def order_of(args: argparse.Namespace, net: Any, book: list[list[int]], bar: Any) -> list[int]:
    """Return the layers, the most sensitive first: of a profile, or scanned now."""
    if args.profile:
        found = load("entropykv", args.profile).profile
        model = fingerprint(net.net.config.get_text_config())
        if found is None or found.model != model or set(found.sensitivity) != set(net.full):
            raise ValueError(f"{args.profile} is not a profile that this model was calibrated to")
        return allocation.ranked(found.sensitivity)
    bar.set_description("scan")
    short = Texts(calibrate.SCAN_TOKENS, 8, calibrate.SCAN_DEPTHS, args.seed + 1)
    cells = scan.cells(net.full)
    scanned = run(
        net, args.model, book, short, cells, args.out / "scan.jsonl", lambda done, total: None
    )
    return allocation.ranked(calibrate.sensitivity(scanned, net.full))


def measure(args: argparse.Namespace) -> tuple[Any, list[Summary]]:
    """Search; return the model and what is left at the end, the full cache first."""
    from tqdm import tqdm

    from entropykv_vllm.evaluation.offline.model import Model

    net = Model(engines.model_folder(args.model))
    book = check.sentences(args, net.tokenizer)
    with tqdm(total=args.texts, unit="text") as bar:
        cells = search.cells(order_of(args, net, book, bar), args.windows)
        total: dict[str, list[float]] = {cell.name: [0.0] * 3 for cell in cells}
        done, found = 0, []
        for until in rounds(args.texts):
            bar.set_description(f"{len(cells)} settings")
            texts = Texts(args.tokens, until - done, (0.0, 1.0), args.seed + 100 + done)
            file = args.out / f"texts{done}-{until}.jsonl"
            found = run(net, args.model, book, texts, cells, file, onto(bar, done))
            _add(total, found, until - done)
            done = until
            check_full(round(total[cells[0].name][1]), done, args.texts)
            cells = _hopeful(total, cells, done, args.target_accuracy)
    left = {cell.name for cell in cells}
    return net, [
        Summary(one.cell, one.held, *(value / done for value in total[one.cell.name]))
        for one in found
        if one.cell.name in left
    ]


def check_full(right: int, done: int, texts: int) -> None:
    """Refuse to tune where the full cache itself answers too little.

    Args:
        right: its right answers so far.
        done: the texts that it was asked so far.
        texts: all that there are.

    Raises:
        RunError: as soon as that is sure, at the latest after all texts.
    """
    most = right / done if done == texts else scoring.wilson(right, done)[1]
    if most < ENOUGH:
        raise RunError(
            f"the full cache answers {right} of {done} texts right, too few to see what settings "
            "lose: take another model, shorter --tokens or another --text"
        )


def _add(total: dict[str, list[float]], found: Sequence[Summary], texts: int) -> None:
    for one in found:
        new = (one.nll * texts, one.right * texts, one.kl * texts)
        total[one.cell.name] = [a + b for a, b in zip(total[one.cell.name], new, strict=True)]


def _hopeful(
    total: dict[str, list[float]], cells: Sequence[Cell], done: int, target: float
) -> list[Cell]:
    """The full cache, and the cells that may still reach the target.

    A full cache that has answered few by now must answer more by the end, or nothing is tuned.
    """
    right = [round(total[cell.name][1]) for cell in cells]
    good = search.hopeful(right, done, target * max(right[0] / done, ENOUGH))
    return [cell for i, cell in enumerate(cells) if i == 0 or i in good]


def best(found: Sequence[Summary], target: float) -> Summary | None:
    """Return what holds least of all that reach the target."""
    goal = target * found[0].right
    enough = [one for one in found[1:] if one.right >= goal - 1e-9]
    return min(enough, key=lambda one: one.held, default=None)


def rows(found: Sequence[Summary], texts: int) -> list[list[str]]:
    """Return the rows of the table, what holds least first."""
    return [
        [
            one.cell.name,
            f"{100 * one.held:.1f}",
            f"{1 / one.held:.1f}",
            table.interval([one.right, *scoring.wilson(round(one.right * texts), texts)]),
            f"{one.kl:.2g}",
        ]
        for one in sorted(found, key=lambda one: one.held)
    ]


def write(args: argparse.Namespace, net: Any, winner: Summary) -> Path:
    """Write the settings as a file for `--kv-eviction-config`; return its path."""
    path: Path = args.out / "settings.json"
    values = winner.cell.config().model_dump(mode="json", exclude_none=True)
    profile.write(path, net.net.config.get_text_config(), Path(args.model).name, {}, values)
    return path


def verdict(winner: Summary | None, path: Path | None) -> str:
    """Say which settings are best, and how to serve with them."""
    if winner is None or path is None:
        return "nothing reaches the target: keep the full cache, or take the preset quality"
    less = f"{1 / winner.held:.1f} times less than a full 16-bit cache"
    return f"best: {winner.cell.name}, {less}\n\n{profile.command(path)}"


def report(found: Sequence[Summary], winner: Summary | None, path: Path | None) -> dict[str, Any]:
    """Return the same as JSON has it, what holds least first."""
    return {
        "settings": [
            {
                "name": one.cell.name,
                "settings": {"policy": one.cell.policy, **one.cell.eviction},
                "held": one.held,
                "right": one.right,
                "nll": one.nll,
                "kl": one.kl,
            }
            for one in sorted(found, key=lambda one: one.held)
        ],
        "best": None if winner is None else winner.cell.name,
        "file": None if path is None else str(path),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    args = parser().parse_args(argv)
    check.check(args, "tune")
    if sentence := warning(args.texts, args.target_accuracy):
        print(f"entropykv tune: warning: {sentence}", file=sys.stderr)
    try:
        net, found = measure(args)
    except ValueError as error:
        raise UsageError(str(error)) from None
    header = ["settings", "held %", "times smaller", "right % (95 %)", "KL"]
    winner = best(found, args.target_accuracy)
    path = None if winner is None else write(args, net, winner)
    told = f"\n{table.render(header, rows(found, args.texts))}\n\n{verdict(winner, path)}"
    show(told, report(found, winner, path), args.json)
    return 0 if winner else 1


if __name__ == "__main__":
    raise SystemExit(main())
