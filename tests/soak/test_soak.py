# SPDX-License-Identifier: Apache-2.0
"""What goes wrong in a soak is noticed, without a server."""

import asyncio
import json
import os
from unittest import mock

import pytest
from aiohttp import test_utils, web

from . import watch
from .load import Clients
from .watch import Look, Watch, growth

BODY = {"prompt": [1], "vllm_xargs": {}}


def test_growth_is_that_of_the_last_half():
    """A server that warms up, or holds much for a moment, has not grown."""
    seconds = range(0, 3600, 9)
    warm = [Look(s, min(s, 1800) + (500 if s % 90 else 0), 0.5) for s in seconds]
    assert growth(warm) == (0, 0.25)
    leaks = [Look(s, s / 36, 0.5) for s in seconds]
    assert growth(leaks) == (25, 0.25)


def test_a_watch_that_ends_too_early_is_told(monkeypatch):
    monkeypatch.setattr(watch, "PERIOD", 0.0)
    told = mock.Mock(side_effect=[{"vllm:kv_cache_usage_perc": 0.5}, TimeoutError])
    monkeypatch.setattr(watch, "counters", told)
    watching = Watch("", os.getpid())
    watching.start()
    watching.join(20)
    assert len(watching.looks) == 1
    with pytest.raises(RuntimeError, match="nobody watched"):
        watching.stop()


def streamed(text: str) -> list[str]:
    """What clients say of a server that streams this."""

    async def answer(_: web.Request) -> web.Response:
        return web.Response(text=text)

    async def ask() -> list[str]:
        app = web.Application()
        app.router.add_post("/v1/completions", answer)
        async with test_utils.TestServer(app) as there, test_utils.TestClient(there) as session:
            clients = Clients("", 0)
            clients.session = session
            await clients._stream({**BODY, "stream": True}, None)
        return clients.tally.faults

    return asyncio.run(ask())


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('data: {"choices": []}\n\ndata: [DONE]\n', None),
        ('data: {"error": {"message": "oh"}}\n\ndata: [DONE]\n', "a stream failed"),
        ('data: {"choices": []}\n', "a stream ended early"),
    ],
)
def test_a_stream_that_fails_or_ends_early_is_told(text, fault):
    found = streamed(text)
    assert [line.startswith(fault) for line in found] == [True] if fault else found == []


@pytest.mark.parametrize(
    ("status", "made", "wish", "fault"),
    [
        (200, 10, {}, None),
        (200, 9, {}, "9 tokens were answered, and 10 asked for"),
        (200, 9, {"kv_eviction": "none"}, None),
        (400, 0, {"kv_eviction": "none"}, None),
        (400, 0, {}, "a request got HTTP 400"),
    ],
)
def test_an_answer_that_is_missing_or_short_is_told(status, made, wish, fault):
    clients = Clients("", 0)
    body = {"prompt": [1], "vllm_xargs": wish, "max_tokens": 5, "n": 2}
    clients._judge(body, status, json.dumps({"usage": {"completion_tokens": made}}))
    found = clients.tally.faults
    assert [line.startswith(fault) for line in found] == [True] if fault else found == []


def test_whatever_stops_a_client_is_told():
    async def client() -> None:
        raise KeyError("choices")

    clients = Clients("", 0)
    asyncio.run(clients._connected(client()))
    assert clients.tally.faults == ["a client did not get an answer: KeyError('choices')"]
