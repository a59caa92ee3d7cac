# SPDX-License-Identifier: Apache-2.0
"""Single requests again: one of a run, or all findings to vLLM without the plugin."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from entropykv_vllm.evaluation import table

from . import answers, record, servers
from .bases import bases
from .cases import Case, Cases
from .clients import Clients, session
from .known import KNOWN, is_known
from .schema import schema_of


def only(seed: int, index: int) -> int:
    """Send one request of a run, and show it and its answer; 1 if that is not right."""

    async def send(clients: Clients) -> list[str]:
        known = bases()
        case = Cases(seed, schema_of(clients.url), known, await clients.tokens(known)).case(index)
        print(f"{case.kind}: {case.method} {case.target} {dict(case.headers)}\n{case.body!r}\n")
        answer = await clients.send(case)
        print(f"HTTP {answer.status} {answer.kind}\n{answer.body.decode(errors='replace')}\n")
        return answers.faults(case, answer)

    with servers.evicting() as (url, _):
        faults = _with_clients(url, send)
    print(answers.listed(faults) or "that is right")
    return bool(faults)


def stock() -> int:
    """Send all findings to vLLM alone; 1 if one that is said to be vLLM's own is not."""
    examples = [Case("known", *known.example) for known in KNOWN]
    cases = [*examples, *record.read()]

    async def send(clients: Clients) -> list[tuple[int, str]]:
        found = [await clients.send(case) for case in cases]
        return [(answers.status_of(a), answers.message(a.body)) for a in found]

    with servers.stock() as (url, _):
        said = _with_clients(url, send)
    rows = [
        [case.kind, f"{case.method} {case.target[:60]}", str(status), sentence[:100]]
        for case, (status, sentence) in zip(cases, said, strict=True)
    ]
    print(table.render(["", "request", "status without the plugin", "sentence"], rows))
    pairs = zip(examples, said, strict=False)
    wrong = [c for c, (status, words) in pairs if status < 500 or not is_known(c.path, words)]
    print("\n".join(f"FAULT: not vLLM's own: {c.target} {c.body!r}" for c in wrong) or "as known")
    return bool(wrong)


def _with_clients(url: str, send: Callable[[Clients], Any]) -> Any:
    async def run() -> Any:
        async with session() as connections:
            return await send(Clients(url, connections))

    return asyncio.run(run())
