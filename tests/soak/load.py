# SPDX-License-Identifier: Apache-2.0
"""Clients of every kind, from a seed: long and short, streamed, aborted, wrong, in bursts."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from entropykv_vllm.evaluation.server import SERVED_NAME

#: Seconds after which a request is stuck, however many are before it and however busy the machine.
PATIENCE = 600.0
#: The most requests under way at a time.
MOST = 64
CANARY = "The lighthouse keeper wrote down each ship that passed: " + ", ".join(
    f"the {name} at {hour} o'clock"
    for hour in range(1, 13)
    for name in ("Aurora", "Meridian", "Albatross", "Northern Star", "Petrel", "Concordia")
)
WISHES: list[dict[str, Any]] = [
    *[{}] * 4,
    {"kv_eviction": "none"},
    {"kv_keep": 0.2},
    {"kv_protect": ["0:60"]},
]
#: Bodies that get HTTP 400.
WRONG: list[dict[str, Any]] = [
    {"max_tokens": -1},
    {"temperature": 9},
    {"vllm_xargs": {"kv_keep": 7}},
    {"vllm_xargs": {"kv_eviction": "h2o"}},
    {"vllm_xargs": {"kv_protect": ["5:1"]}},
    {"prompt": [3] * 9000},
]


@dataclass
class Tally:
    """What came of the requests: how many ended in which way, and what is wrong."""

    ended: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    canaries: set[str] = field(default_factory=set)
    most: int = 0


class Clients:
    """All clients of a server."""

    def __init__(self, url: str, seed: int) -> None:
        self.url, self.rng, self.tally = url, random.Random(seed), Tally()
        self.tasks: set[asyncio.Task[None]] = set()

    async def run(self, seconds: float) -> Tally:
        """Send for a time, then wait for what is under way."""
        # A connection that is used again may be closed by the server just then.
        limits = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(connector=limits) as session:
            self.session = session
            await self._canary()
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                burst = MOST if self.rng.random() < 0.03 else self.rng.randint(1, 3)
                # Before the others, which may leave no room for it.
                self._start(self._canary())
                for _ in range(burst):
                    self._start(self._one())
                await asyncio.sleep(self.rng.expovariate(0.5))
            await asyncio.gather(*self.tasks)
            await self._canary()
        return self.tally

    def _start(self, client: Coroutine[Any, Any, None]) -> None:
        if len(self.tasks) >= MOST:
            client.close()
            return
        task = asyncio.create_task(self._connected(client))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        self.tally.most = max(self.tally.most, len(self.tasks))

    async def _connected(self, client: Coroutine[Any, Any, None]) -> None:
        try:
            await client
        except Exception as error:  # one that nobody waits for would be lost
            self.tally.faults.append(f"a client did not get an answer: {error!r}")

    async def _canary(self) -> None:
        """The same question, always: the same answer, whoever else is there."""
        status, text = await self._post({"prompt": CANARY, "max_tokens": 8, "temperature": 0})
        self.tally.ended["canary"] += 1
        if status != 200:
            self.tally.faults.append(f"a canary got HTTP {status}: {text[:200]}")
            return
        self.tally.canaries.add(json.loads(text)["choices"][0]["text"])

    async def _one(self) -> None:
        kind = self.rng.choices(["plain", "stream", "abort", "wrong"], [4, 3, 3, 1])[0]
        body = self._body()
        if kind == "wrong":
            status, text = await self._post({**body, **self.rng.choice(WRONG)})
            if status != 400:
                self.tally.faults.append(f"a wrong request got HTTP {status}: {text[:200]}")
        elif kind == "plain":
            self._judge(body, *await self._post(body))
        else:
            leave = self.rng.uniform(0, 4) if kind == "abort" else None
            await self._stream({**body, "stream": True}, leave)
        self.tally.ended[kind] += 1

    def _judge(self, body: dict[str, Any], status: int, text: str) -> None:
        """A request is answered, and with as many tokens as it asked for."""
        if status not in (200, *_refusable(body)):
            self.tally.faults.append(f"a request got HTTP {status}: {text[:200]}")
        elif status == 200:
            made, asked = json.loads(text)["usage"]["completion_tokens"], _asked(body)
            if made != asked and not _refusable(body):
                self.tally.faults.append(f"{made} tokens were answered, and {asked} asked for")

    def _body(self) -> dict[str, Any]:
        length = self.rng.choice([self.rng.randint(5, 200), self.rng.randint(200, 3000)])
        # Families of prompts that begin alike, so that prefixes are found.
        family, rng = self.rng.randrange(4), random.Random(self.rng.randrange(8))
        prompt = [1000 + family, *(rng.randrange(100, 40_000) for _ in range(length))]
        body = {
            "prompt": prompt,
            "max_tokens": self.rng.randint(1, 60),
            "temperature": self.rng.choice([0, 0.8]),
            "ignore_eos": True,
            "vllm_xargs": self.rng.choice(WISHES) if length > 80 else {},
        }
        if body["temperature"] and self.rng.random() < 0.3:
            body["n"] = 2
        return body

    async def _post(self, body: dict[str, Any]) -> tuple[int, str]:
        try:
            async with asyncio.timeout(PATIENCE), self._request(body) as answer:
                return answer.status, await answer.text()
        except TimeoutError:
            return 0, f"no answer within {PATIENCE:.0f} seconds"

    async def _stream(self, body: dict[str, Any], leave: float | None) -> None:
        """Read a stream to its end, or go away after some seconds."""
        try:
            async with asyncio.timeout(PATIENCE if leave is None else leave):
                async with self._request(body) as answer:
                    lines = [line async for line in answer.content if line.startswith(b"data: ")]
        except TimeoutError:
            if leave is None:
                self.tally.faults.append(f"a stream did not end within {PATIENCE:.0f} seconds")
            return
        if answer.status in _refusable(body):
            return
        # vLLM ends a stream that fails as any other.
        if failed := [line for line in lines if line.startswith(b'data: {"error"')]:
            self.tally.faults.append(f"a stream failed: {failed[0][:200]!r}")
        if not lines or lines[-1].strip() != b"data: [DONE]":
            self.tally.faults.append(f"a stream ended early, HTTP {answer.status}: {lines[-1:]}")

    def _request(self, body: dict[str, Any]) -> Any:
        whole = {"model": SERVED_NAME, **body}
        return self.session.post(f"{self.url}/v1/completions", json=whole)


def _asked(body: dict[str, Any]) -> int:
    """How many tokens a request asks for."""
    return int(body["max_tokens"] * body.get("n", 1))


def _refusable(body: dict[str, Any]) -> tuple[int, ...]:
    """What else a request may get: one that is not evicted may never fit."""
    return (400,) if body["vllm_xargs"].get("kv_eviction") == "none" else ()
