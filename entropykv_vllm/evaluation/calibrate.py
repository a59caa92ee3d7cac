# SPDX-License-Identifier: Apache-2.0
"""`entropykv calibrate`: which layers of a model must keep more?

Each full-attention layer is cut in turn, and a number hidden in a few short texts is asked for. The
layers that hurt most keep everything in the end, the others pay for it; how many, is tried out on
longer texts. The result is a file that `--kv-eviction-config` takes, for this model only.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from entropykv_vllm.errors import UsageError
from entropykv_vllm.evaluation import engines, options, passages, table
from entropykv_vllm.evaluation.calibration import allocation, check, interval, profile, scan
from entropykv_vllm.evaluation.calibration.run import Summary, Texts, run
from entropykv_vllm.evaluation.offline.cell import Cell, layout
from entropykv_vllm.evaluation.progress import bar, onto
from entropykv_vllm.help_text import command_parser
from entropykv_vllm.json_file import add_json, show
from entropykv_vllm.option_values import COUNT, LENGTH, SEED, Whole

SCAN_TOKENS = 1024
#: Short texts end in tokens that no layer gives up, where nothing must be asked for.
SCAN_DEPTHS = (0.0, 0.7)


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    p = command_parser("calibrate", __doc__)
    options.add_model_argument(p)
    options.add_keep(p)
    p.add_argument("--bits", type=int, default=4, choices=(16, 8, 4), help="of old pages")
    p.add_argument(
        "--window",
        type=Whole(check.LEAST_WINDOW),
        default=256,
        help="newest tokens left as they are",
    )
    p.add_argument("--texts", "--prompts", type=COUNT, default=8, help="texts a step")
    p.add_argument("--tokens", type=LENGTH, default=2048, help="of the longer texts")
    options.add_text(p)
    p.add_argument("--seed", type=SEED, default=0, help="of the numbers (default: 0)")
    options.add_out(p, "results/calibrate/MODEL")
    add_json(p)
    return p


def candidates(args: argparse.Namespace, order: Sequence[int]) -> list[Cell]:
    """Return the full cache and the tiers to be tried."""
    common = {"keep": args.keep, "bits": args.bits, "window": args.window}
    found = [scan.WHOLE]
    for whole in (0, *allocation.sizes(len(order))):
        tops = (1.0, min(1.0, 2 * args.keep)) if whole else (args.keep,)
        for top in dict.fromkeys(tops):
            tiers = allocation.tiers(order, whole, args.keep, top)
            if tiers:
                name = allocation.named(whole, top) if whole else "all layers alike"
                found.append(Cell(name, "entropykv", {**common, "tiers": tiers}))
    return found


def best(tried: Sequence[Summary]) -> Summary:
    """Return the tiers that answer most; of equal ones, those least surprised by the answer."""
    return min(tried[1:], key=lambda one: (-one.right, one.nll, one.kl))


def final(net: Any, cell: Cell) -> dict[str, Any]:
    """Return the settings of a profile: those of a cell, with the interval of the least peak.

    What is held at the end of a text does not tell intervals apart, only what is held on the way.
    """
    settings = {"policy": cell.policy, **cell.eviction}
    tiers = settings.pop("tiers")
    every = interval.least_peak(layout(cell, net, torch.bfloat16).plans, net.positions)
    return {**settings, "interval": every, "tiers": tiers}


def scan_rows(found: Sequence[Summary], layers: Sequence[int]) -> list[list[str]]:
    """Return the rows of the scan's table, the most sensitive layer first."""
    whole, cut = found[0], dict(zip(layers, found[1:], strict=True))
    return [
        [str(layer), f"{one.nll - whole.nll:.3f}", table.percent(one.right), f"{one.kl:.2g}"]
        for layer, one in sorted(cut.items(), key=lambda item: -item[1].nll)
    ]


def tried_rows(tried: Sequence[Summary]) -> list[list[str]]:
    """Return the rows of the table of tiers."""
    return [
        [
            one.cell.name,
            table.percent(one.held),
            table.percent(one.right),
            f"{one.nll:.3f}",
            f"{one.kl:.2g}",
        ]
        for one in tried
    ]


def measure(
    args: argparse.Namespace,
) -> tuple[Any, list[list[int]], list[Summary], list[Summary]]:
    """Scan the layers, then try tiers; return the model, the text, and what both found."""
    from entropykv_vllm.evaluation.offline.model import Model

    engines.load_tokenizer(args.model)  # which says what is wrong in a sentence
    net = Model(engines.model_folder(args.model))
    book = check.sentences(args, net.tokenizer)
    with bar(2 * args.texts, "text") as shown:
        shown.set_description("scan")
        short = Texts(SCAN_TOKENS, args.texts, SCAN_DEPTHS, args.seed)
        cells = scan.cells(net.full)
        found = run(net, args.model, book, short, cells, args.out / "scan.jsonl", onto(shown))
        shown.set_description("tiers")
        longer = Texts(args.tokens, args.texts, (0.0, 1.0), args.seed + 1)
        cells = candidates(args, allocation.ranked(sensitivity(found, net.full)))
        tried = run(
            net, args.model, book, longer, cells, args.out / "tiers.jsonl", onto(shown, args.texts)
        )
    return net, book, found, tried


def sensitivity(found: Sequence[Summary], layers: Sequence[int]) -> dict[int, float]:
    """Return what cutting each layer costs: nats of surprise at a right answer."""
    return {layer: one.nll - found[0].nll for layer, one in zip(layers, found[1:], strict=True)}


def signal_rows(net: Any, text: list[int], found: Sequence[Summary]) -> list[list[str]]:
    """Return how well the keys and values of a plain text tell what the scan says."""
    from entropykv_vllm.evaluation.calibration import signals
    from entropykv_vllm.evaluation.offline.reading import Reading

    reading = Reading(net, text)
    measured = signals.measure([reading.rows[layer] for layer in net.full])
    known = list(sensitivity(found, net.full).values())
    top = max(1, len(known) // 6)
    return [
        [name, f"{correlation:+.2f}", f"{hits}/{top}"]
        for name, correlation, hits in signals.agreement(measured, known, top)
    ]


HEADERS = {
    "scan": ["layer cut", "nats more", "right %", "KL"],
    "tiers": ["tiers", "held %", "right %", "nats", "KL"],
    "signals": ["signal without a scan", "rank correlation", "of the most sensitive"],
}


def tables(summary: dict[str, list[list[str]]]) -> str:
    """Return the tables of the scan, the tiers and the signals."""
    return "\n\n".join(table.render(header, summary[key]) for key, header in HEADERS.items())


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    args = parser().parse_args(argv)
    name = Path(args.model).name
    check.check(args, "calibrate")
    try:
        net, book, found, tried = measure(args)
    except ValueError as error:
        raise UsageError(str(error)) from None
    winner = best(tried)
    (text,) = passages.cut(book, 1, args.tokens, passages.opening(net.tokenizer))
    path = args.out / "profile.json"
    config = net.net.config.get_text_config()
    profile.write(path, config, name, sensitivity(found, net.full), final(net, winner.cell))
    summary = {
        "scan": scan_rows(found, net.full),
        "tiers": tried_rows(tried),
        "signals": signal_rows(net, text, found),
    }
    (args.out / "table.json").write_text(json.dumps(summary, indent=1) + "\n")
    shown = (
        f"\n{tables(summary)}\n\nbest: {winner.cell.name}\n\n{profile.command(path, net.folder)}"
    )
    show(shown, {**summary, "best": winner.cell.name, "profile": str(path)}, args.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
