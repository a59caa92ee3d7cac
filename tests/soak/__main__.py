# SPDX-License-Identifier: Apache-2.0
"""Drive a server with mixed load for some minutes, and see that nothing is lost: `make soak`."""

from __future__ import annotations

import argparse
import asyncio
import os

import psutil

from entropykv_vllm.evaluation import table
from entropykv_vllm.evaluation.engines import model_folder
from entropykv_vllm.evaluation.server import counters, serving

from . import products
from .load import Clients, Tally
from .watch import Look, Watch, growth, left_behind

#: MiB for pages: full for minutes under this load.
POOL = 48
#: MiB that an allocator may keep from one quarter to the next, and MiB an hour beyond that.
ROOM, MOST_AN_HOUR = 24.0, 60.0
#: Minutes for which a server may warm up: memory of shorter runs is shown and not judged.
WARM = 15.0
#: Preemptions for each request that was answered.
MOST_PREEMPTIONS = 1.0


def arguments() -> list[str]:
    """How the server is started: a small pool, and all pages watched."""
    return [
        *("--kv-eviction", "entropykv", "--kv-eviction-config", '{"keep": 0.5, "debug": true}'),
        *("--kv-cache-dtype", "bfloat16", "--kv-cache-memory-bytes", str(POOL << 20)),
        *("--max-model-len", "4096", "--max-num-seqs", "64", "--enforce-eager"),
    ]


def soak(minutes: float, seed: int) -> tuple[list[list[str]], list[str]]:
    """Run it; what was seen, as rows, and what was wrong."""
    with serving(model_folder("SmolLM2-135M-Instruct"), arguments()) as (url, log):
        before = counters(url)
        watch = Watch(url, _server())
        watch.start()
        tally = asyncio.run(Clients(url, seed).run(60 * minutes))
        left = left_behind(url)
        looks, after = watch.stop(), counters(url)
        told = log.read_text()
    preempted = after["vllm:num_preemptions_total"] - before["vllm:num_preemptions_total"]
    grown, hours = growth(looks)
    faults = [*tally.faults, *_faults(tally, looks, left, preempted)]
    if minutes >= WARM and grown > ROOM + MOST_AN_HOUR * hours:
        faults.append(f"memory grew by {grown:.0f} MiB in {60 * hours:.0f} minutes")
    faults += [line for line in told.splitlines() if "Traceback" in line or "AuditError" in line]
    return _rows(tally, looks, preempted, grown), faults


def _server() -> int:
    """The process that was started here."""
    return next(p.pid for p in psutil.Process().children() if "vllm" in " ".join(p.cmdline()))


def _faults(tally: Tally, looks: list[Look], left: dict[str, float], preempted: float) -> list[str]:
    answered = sum(tally.ended[kind] for kind in ("canary", "plain", "stream"))
    wrong = {
        f"{len(tally.canaries)} answers to one question": len(tally.canaries) != 1,
        f"left behind: {left}": bool(left),
        f"{preempted:.0f} preemptions of {answered} requests": preempted
        > MOST_PREEMPTIONS * answered,
        "the pool was never full, so this says little": max(x.used for x in looks) < 0.95,
    }
    return [sentence for sentence, holds in wrong.items() if holds]


def _rows(tally: Tally, looks: list[Look], preempted: float, grown: float) -> list[list[str]]:
    full = sum(look.used > 0.95 for look in looks) / len(looks)
    return [
        *([f"requests: {kind}", str(count)] for kind, count in sorted(tally.ended.items())),
        ["at most at a time", str(tally.most)],
        ["preemptions", f"{preempted:.0f}"],
        ["time with the pool over 95 % full", f"{full:.0%}"],
        [
            "memory, MiB: least, most",
            f"{min(x.megabytes for x in looks):.0f}, {max(x.megabytes for x in looks):.0f}",
        ],
        ["memory grew in a quarter of the time, MiB", f"{grown:.0f}"],
        ["answers to the canary", str(len(tally.canaries))],
    ]


def main() -> int:
    """Run the command; return the exit status."""
    parser = argparse.ArgumentParser(prog="tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    args = parser.parse_args()
    # What oneDNN keeps grows for hours and would hide what we lose.
    os.environ[products.VARIABLE] = products.BOUND
    rows, faults = soak(args.minutes, args.seed)
    print(table.render(["", f"{args.minutes:g} minutes, seed {args.seed}"], rows))
    print("\n".join(f"FAULT: {fault}" for fault in faults) or "nothing was lost")
    return bool(faults)


if __name__ == "__main__":
    raise SystemExit(main())
