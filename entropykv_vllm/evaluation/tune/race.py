# SPDX-License-Identifier: Apache-2.0
"""All settings answer the first few texts; those that cannot win any more are given up."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from entropykv_vllm.config.profile import fingerprint
from entropykv_vllm.config.settings import load
from entropykv_vllm.errors import RunError
from entropykv_vllm.evaluation import calibrate, engines
from entropykv_vllm.evaluation.calibration import allocation, check, scan, search
from entropykv_vllm.evaluation.calibration.run import Summary, Texts, run
from entropykv_vllm.evaluation.offline.cell import Cell
from entropykv_vllm.evaluation.progress import bar, onto
from entropykv_vllm.evaluation.scoring import wilson

#: The share of texts that the full cache must answer right: else nothing can be seen to be lost.
ENOUGH = 0.5
#: Short texts from which the layers' order is read, if no profile has it.
SCANNED = 8


@dataclass
class Standing:
    """What a cell has made of `texts` texts so far: sums, and `held` as in `Summary`."""

    cell: Cell
    held: float = 0.0
    texts: int = 0
    nll: float = 0.0
    right: float = 0.0
    kl: float = 0.0

    def add(self, one: Summary, texts: int) -> None:
        """Count a round of `texts` more texts in."""
        self.held = one.held
        self.texts += texts
        self.nll += one.nll * texts
        self.right += one.right * texts
        self.kl += one.kl * texts

    def mean(self) -> Summary:
        """Return the means over its texts."""
        sums = (self.nll, self.right, self.kl)
        return Summary(self.cell, self.held, *(value / self.texts for value in sums))


def rounds(texts: int) -> list[int]:
    """Return how many texts have been answered at the end of each round."""
    found = [texts]
    while found[0] > 4:
        found.insert(0, found[0] // 2)
    return found


def race(args: argparse.Namespace) -> tuple[Any, list[Standing]]:
    """Return the model and all standings, the full cache first.

    Those that were given up have fewer than `args.texts` texts.

    Raises:
        ValueError: what was asked for does not fit the model or the text, in one sentence.
        RunError: the full cache itself answers too little.
    """
    from entropykv_vllm.evaluation.offline.model import Model

    engines.load_tokenizer(args.model)  # which says what is wrong in a sentence
    net = Model(engines.model_folder(args.model))
    book = check.sentences(args, net.tokenizer)
    before = 0 if args.profile else SCANNED
    with bar(before + args.texts, "text") as shown:
        shown.set_description("scan")
        order = order_of(args, net, book, onto(shown))
        found = [Standing(cell) for cell in search.cells(order, args.windows)]
        for until in rounds(args.texts):
            left = hopeful(found, args.target_accuracy)
            shown.set_description(f"{len(left)} settings")
            _round(args, net, book, left, until, onto(shown, before + found[0].texts))
            check_full(round(found[0].right), until, args.texts)
    return net, found


def _round(
    args: argparse.Namespace,
    net: Any,
    book: list[list[int]],
    left: Sequence[Standing],
    until: int,
    progress: Callable[[int, int], None],
) -> None:
    """Let those that are left answer texts until they have answered `until`."""
    done = left[0].texts
    texts = Texts(args.tokens, until - done, (0.0, 1.0), args.seed + 100 + done)
    file: Path = args.out / f"texts{done}-{until}.jsonl"
    cells = [one.cell for one in left]
    for one, new in zip(
        left, run(net, args.model, book, texts, cells, file, progress), strict=True
    ):
        one.add(new, until - done)


def order_of(
    args: argparse.Namespace,
    net: Any,
    book: list[list[int]],
    progress: Callable[[int, int], None],
) -> list[int]:
    """Return the layers, the most sensitive first: of a profile, or scanned now.

    Raises:
        ValueError: if the profile is another model's.
    """
    if args.profile:
        found = load("entropykv", args.profile).profile
        model = fingerprint(net.net.config.get_text_config())
        if found is None or found.model != model or set(found.sensitivity) != set(net.full):
            raise ValueError(f"{args.profile} is not a profile that this model was calibrated to")
        return allocation.ranked(found.sensitivity)
    short = Texts(calibrate.SCAN_TOKENS, SCANNED, calibrate.SCAN_DEPTHS, args.seed + 1)
    file = args.out / "scan.jsonl"
    scanned = run(net, args.model, book, short, scan.cells(net.full), file, progress)
    return allocation.ranked(calibrate.sensitivity(scanned, net.full))


def check_full(right: int, done: int, texts: int) -> None:
    """Refuse to tune where the full cache itself answers too little.

    Args:
        right: its right answers so far.
        done: the texts that it was asked so far.
        texts: all that there are.

    Raises:
        RunError: as soon as that is sure, at the latest after all texts.
    """
    most = right / done if done == texts else wilson(right, done)[1]
    if most < ENOUGH:
        raise RunError(
            f"the full cache answers {right} of {done} texts right, too few to see what settings "
            "lose: take another model, shorter --tokens or another --text"
        )


def hopeful(found: Sequence[Standing], target: float) -> list[Standing]:
    """Return the full cache, which is the first, and what may still reach the target.

    A full cache that has answered few by now must answer more by the end, or nothing is tuned.
    """
    full = found[0]
    if full.texts == 0:
        return list(found)
    running = [one for one in found if one.texts == full.texts]
    right = [round(one.right) for one in running]
    good = search.hopeful(right, full.texts, target * max(right[0] / full.texts, ENOUGH))
    return [one for i, one in enumerate(running) if i == 0 or i in good]
