# SPDX-License-Identifier: Apache-2.0
"""Send a server random requests, right and wrong, and see that each gets the right answer."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections import Counter

from entropykv_vllm.errors import RunError
from entropykv_vllm.evaluation import table
from entropykv_vllm.evaluation.progress import bar
from entropykv_vllm.evaluation.server import is_ready
from tests.soak.watch import left_behind

from . import answers, record, replay, servers
from .bases import bases
from .cases import KINDS, Cases
from .clients import Clients, Finding, Tally, session
from .known import explains, is_known
from .log import complaints
from .schema import schema_of

#: What is printed of a body; all of it is in the file of the findings.
SHOWN = 2000
#: Requests from which on each kind must have been accepted and refused.
ENOUGH = 1000


def fuzz(seed: int, requests: int) -> tuple[list[list[str]], list[str]]:
    """Run it; what was seen, as rows, and what was wrong."""
    begin = time.monotonic()
    with servers.evicting() as (url, log):
        before = servers.family()
        started = time.monotonic()
        tally = asyncio.run(_send(url, seed, requests))
        seconds = time.monotonic() - started
        healthy, left = is_ready(url), left_behind(url)
        ended = before - servers.family()
        told = log.read_text()
    record.write(tally.findings)
    known = [f for f in tally.findings if _is_vllms(f)]
    faults = [*tally.faults, *(_sentence(seed, f) for f in tally.findings if f not in known)]
    wrong = {"it does not answer /health": not healthy, f"left behind: {left}": bool(left)}
    wrong[f"processes of the server ended: {ended}"] = bool(ended)
    faults += [sentence for sentence, holds in wrong.items() if holds]
    if requests >= ENOUGH:
        faults += [f"no {kind} got HTTP {code}" for kind, code in one_sided(tally)]
    logged = complaints(told)
    faults += [f"{n} times in the log: {line}" for line, n in logged.items() if not explains(line)]
    times = ["seconds: start, requests", f"{started - begin:.0f}, {seconds:.0f}"]
    return [*_rows(tally, len(known), logged), times], faults


async def _send(url: str, seed: int, requests: int) -> Tally:
    async with session() as connections:
        clients = Clients(url, connections)
        await clients.learn()
        known = bases()
        cases = Cases(seed, schema_of(url), known, await clients.tokens(known))
        with bar(requests, "request") as shown:
            await clients.run(cases, range(requests), shown)
    return clients.tally


def one_sided(tally: Tally) -> list[tuple[str, str]]:
    """The kinds of requests that were never accepted, or never refused, and with what."""
    wanted = [(kind, code) for kind in KINDS for code in ("200", "400")]
    return [pair for pair in wanted if not tally.statuses[pair]]


def _is_vllms(finding: Finding) -> bool:
    status = answers.status_of(finding.answer)
    return status >= 500 and is_known(finding.case.path, answers.message(finding.answer.body))


def _sentence(seed: int, finding: Finding) -> str:
    case, body = finding.case, finding.case.body or b""
    return (
        f"request {finding.index} of seed {seed}: {'; '.join(finding.faults)}\n"
        f"  {case.kind}: {case.method} {case.target[:SHOWN]} {dict(case.headers)}\n"
        f"  {body[:SHOWN]!r}\n"
        f"  again: python -m tests.fuzz --seed {seed} --only {finding.index}"
    )


def _rows(tally: Tally, known: int, logged: Counter[str]) -> list[list[str]]:
    return [
        *([f"{kind}: HTTP {code}", str(n)] for (kind, code), n in sorted(tally.statuses.items())),
        ["500, 501 from vLLM itself, without the plugin too", str(known)],
        [
            "tracebacks of vLLM itself in the log",
            str(sum(logged[x] for x in logged if explains(x))),
        ],
        ["canaries: asked, most that one moved (nats)", f"{tally.canaries}, {tally.moved:.4f}"],
    ]


def main() -> int:
    """Run the command; return the exit status."""
    parser = argparse.ArgumentParser(prog="tests.fuzz", description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--only", type=int, metavar="INDEX", help="send this one, and show it")
    parser.add_argument(
        "--stock",
        action="store_true",
        help="send the findings of the last run, and the known ones, to vLLM without the plugin",
    )
    args = parser.parse_args()
    if args.stock:
        return replay.stock()
    if args.only is not None:
        return replay.only(args.seed, args.only)
    try:
        rows, faults = fuzz(args.seed, args.requests)
    except RunError as error:
        print(f"FAULT: {error}")
        return 1
    print(table.render(["", f"{args.requests} requests, seed {args.seed}"], rows))
    print(answers.listed(faults) or "each got the right answer")
    return bool(faults)


if __name__ == "__main__":
    raise SystemExit(main())
