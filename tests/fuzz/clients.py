# SPDX-License-Identifier: Apache-2.0
"""Sends the requests of a run, several at a time, and canaries among them."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from yarl import URL

from entropykv_vllm.errors import RunError

from . import answers, canaries
from .answers import Answer
from .bases import Base
from .cases import Case, Cases

#: Seconds after which a request is stuck.
PATIENCE = 240.0
#: Requests at a time, and requests for each canary.
AT_ONCE, EVERY = 12, 16
#: Prompts of canaries that a run uses, and those that it may choose from.
ENOUGH, MOST = 2, 8
#: What is read of the page's events, which do not end.
EVENTS = 3


@dataclass(frozen=True)
class Finding:
    """A request whose answer is not right."""

    index: int
    case: Case
    answer: Answer
    faults: list[str]


@dataclass
class Tally:
    """What came of the requests."""

    statuses: Counter[tuple[str, str]] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)
    canaries: int = 0
    moved: float = 0.0
    faults: list[str] = field(default_factory=list)


def session() -> aiohttp.ClientSession:
    """A connection for each request: the server closes idle ones while requests are drawn here."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True))


class Clients:
    """All clients of a server."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url, self.session, self.tally = url, session, Tally()
        self.first: dict[tuple[str, str], canaries.Answer] = {}

    async def tokens(self, bases: Iterable[Base]) -> list[int]:
        """How long the prompts of requests are, in which all is right: so each is answered."""
        found = []
        for base in bases:
            answer = await self.send(_post(base.path, base.body))
            if answer.status != 200:
                raise RunError(f"{base.path} {base.body}: {answers.message(answer.body)}")
            found.append(base.tokens(json.loads(answer.body)))
        return found

    async def learn(self) -> None:
        """What canaries are answered while nobody else is there."""
        for prompt in canaries.prompts(MOST):
            said = {name: await self._ask(prompt, name) for name in canaries.OPTIONS}
            if not canaries.alike(said):
                self.first |= {(prompt, name): answer for name, answer in said.items()}
            if len(self.first) == ENOUGH * len(canaries.OPTIONS):
                return
        raise RunError(f"no {ENOUGH} prompts of {MOST} tell all options of canaries apart")

    async def run(self, cases: Cases, indices: Iterable[int], shown: Any) -> None:
        """Send requests, and canaries among them."""
        left = iter(indices)

        async def one_after_another() -> None:
            for index in left:
                if index % EVERY == 0:
                    await self.canary(index)
                self.look(index, case := cases.case(index), await self.send(case))
                shown.update()

        await asyncio.gather(*(one_after_another() for _ in range(AT_ONCE)))

    def look(self, index: int, case: Case, answer: Answer) -> None:
        """Count an answer, and keep what is wrong with it."""
        self.tally.statuses[case.kind, f"{answer.status}"] += 1
        if found := answers.faults(case, answer):
            self.tally.findings.append(Finding(index, case, answer, found))

    async def canary(self, index: int) -> None:
        """One of the questions of the beginning: the same answer, whoever else is there."""
        prompt, option = random.Random(index).choice(list(self.first))
        self.tally.canaries += 1
        try:
            moved = canaries.distance(self.first[prompt, option], await self._ask(prompt, option))
        except RunError as error:
            self.tally.faults.append(f"about request {index}: {error}")
            return
        self.tally.moved = max(self.tally.moved, moved)
        if moved > canaries.SAME:
            self.tally.faults.append(
                f"about request {index} a canary ({option}) moved by {moved:.3f}"
            )

    async def _ask(self, prompt: str, option: str) -> canaries.Answer:
        answer = await self.send(_post("/v1/completions", canaries.body(prompt, option)))
        if answer.status != 200:
            raise RunError(f"a canary got {answer.status}: {answers.message(answer.body)}")
        return canaries.answer(answer.body)

    async def send(self, case: Case) -> Answer:
        """Send one request, and read its answer."""
        target = URL(self.url + case.target, encoded=True)
        how = {"data": case.body, "headers": case.headers, "allow_redirects": False}
        try:
            async with (
                asyncio.timeout(PATIENCE),
                self.session.request(case.method, target, **how) as answer,
            ):
                kind = answer.headers.get("Content-Type", "")
                return Answer(answer.status, await _read(case, answer), kind)
        except TimeoutError:
            return Answer(0, _said(f"no answer within {PATIENCE:.0f} seconds"))
        except (aiohttp.ClientError, ValueError) as error:
            return Answer(0, _said(f"{type(error).__name__}: {error}"))


async def _read(case: Case, answer: aiohttp.ClientResponse) -> bytes:
    if answer.status == 200 and case.path == "/entropykv/events":
        return b"".join([await answer.content.readline() for _ in range(EVENTS)])
    return await answer.read()


def _said(text: str) -> bytes:
    return json.dumps({"error": text}).encode()


def _post(path: str, body: dict[str, Any]) -> Case:
    return Case("known", "POST", path, json.dumps(body).encode())
