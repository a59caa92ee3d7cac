# SPDX-License-Identifier: Apache-2.0
"""An open-loop load: requests come when they come, whether or not those before are answered."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from entropykv_vllm.evaluation.server import SERVED_NAME


@dataclass
class Answer:
    """What became of a request; seconds since the load began.

    Attributes:
        sent: when it was sent.
        tokens: when tokens of its answer came, as pairs of a time and how many came at once.
        text: the answer.
        error: why there is none.
    """

    sent: float
    tokens: list[tuple[float, int]] = field(default_factory=list)
    text: str = ""
    error: str | None = None

    @property
    def first(self) -> float:
        """When the first token came."""
        return self.tokens[0][0]

    @property
    def last(self) -> float:
        """When the last token came."""
        return self.tokens[-1][0]

    @property
    def count(self) -> int:
        """How many tokens came."""
        return sum(count for _, count in self.tokens)


def arrivals(count: int, rate: float | None, seed: int = 0) -> list[float]:
    """When requests come, in seconds: as a Poisson process, or all at once without a rate."""
    if rate is None:
        return [0.0] * count
    rng, now, times = random.Random(seed), 0.0, []
    for _ in range(count):
        times.append(now)
        now += rng.expovariate(rate)
    return times


async def drive(
    url: str,
    prompts: Sequence[list[int]],
    times: Sequence[float],
    output: int,
    done: Callable[[int], None] = lambda count: None,
) -> list[Answer]:
    """Send prompts at their times; return what became of them, in their order.

    Args:
        url: of the server, without /v1.
        prompts: as tokens.
        times: seconds from now.
        output: tokens of each answer.
        done: told how many are answered.
    """
    finished, start = 0, time.monotonic()
    limits = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=limits, timeout=aiohttp.ClientTimeout()) as session:

        async def one(prompt: list[int], at: float) -> Answer:
            nonlocal finished
            await asyncio.sleep(at - (time.monotonic() - start))
            answer = await _ask(session, url, prompt, output, start)
            finished += 1
            done(finished)
            return answer

        return list(await asyncio.gather(*map(one, prompts, times)))


async def _ask(
    session: aiohttp.ClientSession, url: str, prompt: list[int], output: int, start: float
) -> Answer:
    answer = Answer(sent=time.monotonic() - start)
    body = {
        "model": SERVED_NAME,
        "prompt": prompt,
        "max_tokens": output,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    try:
        async with session.post(f"{url}/v1/completions", json=body) as response:
            if response.status != 200:
                answer.error = f"HTTP {response.status}: {(await response.text())[:200]}"
                return answer
            async for event in _events(response):
                _take(answer, event, time.monotonic() - start)
    except aiohttp.ClientError as error:
        answer.error = f"{type(error).__name__}: {error}"
    if answer.error is None and not answer.tokens:
        answer.error = "an answer without tokens"
    return answer


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    async for line in response.content:
        data = line.removeprefix(b"data: ").strip()
        if line.startswith(b"data: ") and data != b"[DONE]":
            yield json.loads(data)


def _take(answer: Answer, event: dict[str, Any], now: float) -> None:
    if "error" in event:
        answer.error = str(event["error"])
        return
    for choice in event["choices"]:
        answer.text += choice["text"]
        if count := len(choice.get("token_ids") or ()):
            answer.tokens.append((now, count))
