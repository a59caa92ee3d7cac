# SPDX-License-Identifier: Apache-2.0
"""`entropykv bench`: the load, what it comes to, and the table."""

import asyncio
import json

import pytest
from aiohttp import web

from entropykv_vllm.evaluation import presets
from entropykv_vllm.evaluation.bench import command, plot
from entropykv_vllm.evaluation.bench.cell import arguments
from entropykv_vllm.evaluation.bench.load import Answer, arrivals, drive
from entropykv_vllm.evaluation.bench.summary import (
    Look,
    decoding,
    decoding_rate,
    decoding_share,
    summary,
)
from entropykv_vllm.evaluation.server import environment


def answer(sent: float, times: list[float], text: str = "") -> Answer:
    return Answer(sent, [(at, 1) for at in times], text)


def test_requests_come_at_once_or_as_they_come():
    assert arrivals(3, None) == [0.0, 0.0, 0.0]
    times = arrivals(4000, 2.0)
    assert times[0] == 0
    assert times == sorted(times)
    assert times == arrivals(4000, 2.0)
    assert times[-1] / 4000 == pytest.approx(0.5, rel=0.05)


async def _served(handler, prompts, times):
    app = web.Application()
    app.router.add_post("/v1/completions", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]
    try:
        return await drive(f"http://127.0.0.1:{port}", prompts, times, 3)
    finally:
        await runner.cleanup()


def test_a_load_does_not_wait_for_answers_and_tells_each_fate():
    seen = []

    async def handler(request):
        body = await request.json()
        seen.append(body["prompt"])
        if body["prompt"] == [2]:
            return web.Response(status=400, text="no")
        response = web.StreamResponse()
        await response.prepare(request)
        while len(seen) < 4:  # the first are answered when the last has come
            await asyncio.sleep(0.01)
        events = [
            {"choices": [{"text": "a", "token_ids": [1, 2]}]},
            {"choices": [{"text": "b", "token_ids": [3]}]},
        ]
        if body["prompt"] == [3]:
            events = [{"error": {"message": "died"}}]
        for event in events:
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    prompts = [[0], [1], [2], [3]]
    found = asyncio.run(_served(handler, prompts, [0.0, 0.0, 0.05, 0.1]))
    assert [a.text for a in found[:2]] == ["ab", "ab"]
    assert [a.count for a in found] == [3, 3, 0, 0]
    assert found[2].error == "HTTP 400: no"
    assert "died" in found[3].error
    assert found[3].sent == pytest.approx(0.1, abs=0.09)


def test_only_time_in_which_no_prompt_is_read_counts_as_decoding():
    answers = [answer(0, [1.0, 2.0, 3.0, 4.0]), answer(0, [2.5, 3.5, 4.5])]
    looks = [Look(t, running, 0, 0.5) for t, running in ((1.5, 2), (2.6, 2), (3.2, 2), (3.9, 2))]
    # At 1.5 the second request is still being read.
    assert decoding(answers, looks) == [(2.6, 3.2), (3.2, 3.9)]
    assert decoding_share(answers, looks) == pytest.approx(1.3 / 2.4)
    assert decoding_rate(answers, looks) == pytest.approx(2 / 1.3)
    assert decoding_rate(answers, looks[:3]) is None, "too short to tell"


def test_a_run_comes_to_rates_waits_and_right_answers():
    answers = [answer(0, [1.0, 2.0, 3.0], " 1234567."), answer(1, [3.0, 3.5, 5.0], " 7654321")]
    failed = Answer(2.0, error="HTTP 500: x")
    looks = [Look(t, 2, 1, t / 10) for t in (1, 2, 3)]
    found = summary([*answers, failed], ["1234567", "7654320", "1"], looks)
    assert found["seconds"] == 5
    assert found["tokens a second"] == 6 / 5
    assert found["requests a second"] == 2 / 5
    assert found["seconds to the first token"]["mean"] == 1.5
    assert found["seconds between tokens"]["mean"] == 1.0
    assert found["pool used at most"] == 0.3
    assert found["failed"] == 1
    assert found["errors"] == ["HTTP 500: x"]
    assert found["exact"][0] == pytest.approx(1 / 3)


def test_a_run_without_an_answer_says_why():
    with pytest.raises(ValueError, match="HTTP 500"):
        summary([Answer(0.0, error="HTTP 500: x")], ["1"], [Look(0, 0, 0, 0)])


def result(name: str, rate: float | None, exact: float) -> dict:
    mean = {"mean": 1.0, "low": 0.5, "high": 1.5, "p50": 1.0, "p95": 1.5}
    return {
        "name": name,
        "tokens a second while all decode": rate,
        "tokens a second": 10.0,
        "seconds": 60.0,
        "decoding share": 0.25,
        "running at most": 2,
        "preemptions": 0,
        "seconds to the first token": mean,
        "seconds between tokens": dict.fromkeys(mean),
        "pool used at most": 0.5,
        "exact": [exact, exact, exact],
    }


def test_the_table_tells_ratios_and_gaps():
    lines = command.rows(
        [result("vLLM alone", 20.0, 1.0), result("max", 50.0, 0.5), result("x", None, 0)]
    )
    assert lines[0][1] == "20.0"
    assert lines[1][1:3] == ["50.0 (2.50x)", "10.0 (1.00x)"]
    assert lines[2][1] == "–"
    assert lines[1][6:] == ["75%", "1 (0.5-1.5)", "–", "50%", "50 (50-50)"]


def test_the_picture_is_drawn(tmp_path):
    assert plot.draw(
        [result("vLLM alone", 20.0, 1.0), result("max", None, 0.5)], tmp_path / "a.png"
    )
    assert (tmp_path / "a.png").stat().st_size > 5000


def test_all_caches_get_the_same_memory_and_load():
    args = command.parser().parse_args(
        ["--presets", "max", "--fit", "2", "--serve=--enforce-eager"]
    )
    args.presets = presets.chosen(args.presets)
    stock, ours = (command.spec(args, name, 0) for name in (command.STOCK, "max"))
    differ = {key for key in stock if stock[key] != ours[key]}
    assert differ == {"policy", "eviction"}
    assert stock["pool_bytes"] == pytest.approx(2 * (6144 + 256) * 23040, rel=0.02)
    words = arguments(ours)
    assert words[words.index("--kv-eviction") + 1] == "entropykv"
    assert json.loads(words[words.index("--kv-eviction-config") + 1]) == {"preset": "max"}
    assert "--kv-eviction" not in arguments(stock)
    assert words[-1] == "--enforce-eager"
    assert "VLLM_CPU_KVCACHE_SPACE" not in environment(words)
    assert "VLLM_CPU_KVCACHE_SPACE" in environment([])
