# SPDX-License-Identifier: Apache-2.0
"""The page's routes on an app like vLLM's, with workers that answer and no engine."""

import asyncio
import base64
import json
from contextlib import suppress
from types import SimpleNamespace

import pytest
from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from entropykv_vllm.page import hub, routes
from entropykv_vllm.page.plugin import Page

from .steps import FakeEngine, ran, step, view

ARGS = {
    "kv_eviction": "entropykv",
    "kv_eviction_ui": True,
    "kv_eviction_ui_text": False,
    "api_key": None,
    "host": "cache.example",
    "allowed_origins": ["*", "https://proxy.example"],
    "disable_log_stats": False,
}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(hub, "PERIOD", 0.01)


def app_of(engine: FakeEngine, **more) -> FastAPI:
    app, page = FastAPI(), Page()
    app.state.args = SimpleNamespace(**{**ARGS, **more})
    page.attach_router(app)
    app.add_middleware(CORSMiddleware, allow_origins=["*"])
    with suppress(StopIteration):  # it waits for nothing
        page.init_state(engine, app.state, app.state.args).send(None)
    app.state.page = page
    return app


class Visit:
    """One request to an app, read as it comes."""

    def __init__(self, app: FastAPI, path: str, headers: dict | None = None, room: int = 0) -> None:
        """`room` is for so many messages that were not read yet; 0: for all."""
        path, _, query = path.partition("?")
        self.scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "GET",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": query.encode(),
            "headers": [(k.lower().encode(), v.encode()) for k, v in (headers or {}).items()],
            "server": ("here", 80),
            "client": ("there", 1),
            "scheme": "http",
            "app": app,
        }
        self.sent: asyncio.Queue = asyncio.Queue(room)
        self.gone = asyncio.Event()
        self.task = asyncio.create_task(app(self.scope, self._receive, self.sent.put))

    async def _receive(self) -> dict:
        if not self.gone.is_set():
            await self.gone.wait()
        return {"type": "http.disconnect"}

    async def start(self) -> tuple[int, dict[str, str]]:
        message = await asyncio.wait_for(self.sent.get(), 5)
        return message["status"], {k.decode(): v.decode() for k, v in message["headers"]}

    async def body(self) -> str:
        return (await asyncio.wait_for(self.sent.get(), 5)).get("body", b"").decode()

    async def event(self) -> dict:
        return json.loads((await self.body()).removeprefix("data: "))

    async def until(self, good) -> dict:
        """The first event that is as wanted."""
        for _ in range(300):
            if good(event := await self.event()):
                return event
        raise AssertionError(f"the last event was {event}")

    async def leave(self) -> None:
        self.gone.set()
        await asyncio.wait_for(self.task, 5)


async def ask(app: FastAPI, path: str, **headers: str) -> tuple[int, dict[str, str], str]:
    visit = Visit(app, path, headers)
    status, found = await visit.start()
    body = await visit.body()
    await visit.leave()
    return status, found, body


@pytest.mark.parametrize("path", routes.FILES)
def test_files_come_with_headers_that_let_nothing_in_from_elsewhere(path):
    status, headers, body = asyncio.run(ask(app_of(FakeEngine()), routes.PATH + path))
    assert status == 200
    assert headers["content-type"].split(";")[0] == routes.FILES[path][1]
    assert headers["x-content-type-options"] == "nosniff"
    policy = headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'")
    assert "unsafe" not in policy
    assert "://" not in body.replace("http://www.w3.org/2000/svg", "")
    assert not any(way in body for way in ("innerHTML", "outerHTML", "insertAdjacent", "onclick="))
    assert "document.write" not in body


@pytest.mark.parametrize("off", [{"kv_eviction": "none"}, {"kv_eviction_ui": False}])
def test_there_is_no_page_if_it_or_eviction_is_off(off):
    for path in ("", "/events", "/page.js"):
        assert asyncio.run(ask(app_of(FakeEngine(), **off), routes.PATH + path))[0] == 404


def test_a_viewer_is_told_of_requests_and_of_the_one_it_chose():
    async def look():
        workers = view(layers=(0, 1)), view(layers=(2,))
        ran(*workers, tokens=1000)
        app = app_of(FakeEngine(*workers))
        visit = Visit(app, "/entropykv/events?request=r")
        status, headers = await visit.start()
        assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        about = (await visit.event())["about"]
        assert (about["model"], about["text"], about["pages"]) == ("<b>m</b>", False, 100)
        told = await visit.until(lambda event: event["requests"] and "tiers" in event["story"])
        assert told["tiers"][0]["layers"] == [0, 1, 2]
        assert (told["requests"][0]["id"], told["requests"][0]["prompt"]) == ("r", 1000)
        assert told["story"]["tiers"]["all"]["bands"]
        again = await visit.event()
        assert "bands" not in again["story"]["tiers"]["all"], "what it knows is not sent again"
        for worker in workers:
            worker.note(step(finished=("r",)))
        ended = await visit.until(lambda event: event["story"]["ended"])
        assert ended["story"]["end"] == 1000, "how it was last seen"
        await visit.leave()

    asyncio.run(look())


SECRET = "My password: </script><img src=x onerror=alert(1)>"


def test_text_is_there_with_the_flag_only_and_no_token_ever():
    async def look(text: bool) -> str:
        worker = view()
        ran(worker, tokens=len(SECRET))
        engine = FakeEngine(worker, texts={"r": list(map(ord, SECRET))})
        visit = Visit(app_of(engine, kv_eviction_ui_text=text), "/entropykv/events?request=r")
        await visit.start()
        seen = [await visit.body() for _ in range(30)]
        await visit.leave()
        events = [json.loads(body.removeprefix("data: ")) for body in seen]
        pieces = [
            event["story"]["text"]["pieces"] for event in events if "text" in event.get("story", {})
        ]
        assert str(list(map(ord, SECRET)))[1:9] not in "".join(seen)
        return "".join(piece for some in pieces for piece in some)

    assert asyncio.run(look(True)) == SECRET
    assert asyncio.run(look(False)) == ""


def test_a_text_that_cannot_be_read_hides_nothing_else():
    async def look():
        worker = view()
        ran(worker, tokens=3)
        engine = FakeEngine(worker, texts={"r": [97, -1, 98]})
        visit = Visit(app_of(engine, kv_eviction_ui_text=True), "/entropykv/events?request=r")
        await visit.start()
        await visit.event()
        told = await visit.until(lambda event: "tiers" in event["story"])
        assert (told["problem"], told["requests"][0]["id"]) == (None, "r")
        again = [await visit.event() for _ in range(5)]
        assert [event["problem"] for event in again] == [None] * 5
        await visit.leave()

    asyncio.run(look())


def test_shares_are_bytes_of_each_token():
    async def look():
        engine = FakeEngine(view())
        engine.views[0].requests, ran_view = {}, view()
        ran(ran_view, tokens=1000)
        answer = ran_view.look({"r": [0, -1]})
        old = answer["held"]["r"]["groups"][0]["hot"]
        answer["held"]["r"]["groups"][0]["counts"] = b"\4\0" * old
        engine.views[0].look = lambda known: answer
        visit = Visit(app_of(engine), "/entropykv/events?request=r")
        await visit.start()
        await visit.event()
        told = await visit.until(lambda event: "tiers" in event["story"])
        assert base64.b64decode(told["story"]["tiers"]["all"]["shares"]) == b"\xff" * old
        await visit.leave()

    asyncio.run(look())


def test_the_key_is_asked_for_and_nothing_else_needs_it():
    app = app_of(FakeEngine(view()), api_key=["geheim"])

    async def look():
        refused = await ask(app, "/entropykv/events")
        assert (refused[0], "API key" in refused[2]) == (401, True)
        assert (await ask(app, "/entropykv/events", Authorization="Bearer wrong"))[0] == 401
        assert (await ask(app, "/entropykv/events", Authorization="Bearer geheim"))[0] == 200
        assert (await ask(app, "/entropykv"))[0] == 200

    asyncio.run(look())


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Origin": "https://elsewhere.example", "Host": "here:8000"}, 403),
        ({"Origin": "null", "Host": "here:8000"}, 403),
        ({"Origin": "http://here:8000", "Host": "here:8000"}, 200),
        ({"Sec-Fetch-Site": "same-origin"}, 200),
        ({}, 200),
    ],
)
def test_another_sites_script_reads_nothing(headers, status):
    """vLLM's own answers may be read by all sites, unless it is told otherwise."""
    assert asyncio.run(ask(app_of(FakeEngine(view())), "/entropykv/events", **headers))[0] == status


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("attacker.example:8000", 403),
        ("127.0.0.1.attacker.example", 403),
        ("]", 403),
        ("127.0.0.1:8000", 200),
        ("[::1]:8000", 200),
        ("localhost", 200),
        ("Cache.example:8000", 200),
        ("proxy.example", 200),
    ],
)
def test_text_is_not_for_a_site_that_has_our_address_for_a_while(host, status):
    """Its scripts are the page's own, as far as the browser can tell."""
    headers = {"Host": host, "Sec-Fetch-Site": "same-origin"}
    app = app_of(FakeEngine(view()), kv_eviction_ui_text=True)
    assert asyncio.run(ask(app, "/entropykv/events", **headers))[0] == status
    assert asyncio.run(ask(app_of(FakeEngine(view())), "/entropykv/events", **headers))[0] == 200
    app = app_of(FakeEngine(view()), kv_eviction_ui_text=True, api_key=["geheim"])
    headers["Authorization"] = "Bearer geheim"
    assert asyncio.run(ask(app, "/entropykv/events", **headers))[0] == 200


def test_no_more_than_so_many_look_at_a_time():
    async def look():
        app = app_of(FakeEngine(view()))
        visits = [Visit(app, "/entropykv/events") for _ in range(100)]
        found = [(await visit.start())[0] for visit in visits]
        assert sorted(found) == [200] * hub.MOST_VIEWERS + [503] * (100 - hub.MOST_VIEWERS)
        for visit in visits:
            await visit.leave()
        assert not app.state.page.hub.viewers
        assert (await ask(app, "/entropykv/events"))[0] == 200

    asyncio.run(look())


def test_a_viewer_that_does_not_read_is_given_up(monkeypatch):
    monkeypatch.setattr(routes, "PATIENCE", 0.05)

    async def look():
        app = app_of(FakeEngine(view()))
        visit = Visit(app, "/entropykv/events", room=2)
        await visit.start()
        assert app.state.page.hub.viewers
        await asyncio.wait_for(visit.task, 5)
        assert not app.state.page.hub.viewers

    asyncio.run(look())


def test_workers_are_asked_only_while_somebody_looks():
    async def look():
        engine = FakeEngine(view())
        app = app_of(engine)
        assert engine.questions == 0
        visit = Visit(app, "/entropykv/events")
        await visit.start()
        await visit.until(lambda event: event.get("tiers"))
        await visit.leave()
        await asyncio.sleep(0.1)
        asked = engine.questions
        await asyncio.sleep(0.1)
        assert engine.questions == asked > 0

    asyncio.run(look())


def test_streams_end_when_the_server_stops():
    async def look():
        app = app_of(FakeEngine(view()))
        visit = Visit(app, "/entropykv/events")
        await visit.start()
        app.state.server = SimpleNamespace(should_exit=True)
        await asyncio.wait_for(visit.task, 5)

    asyncio.run(look())


def test_an_engine_that_does_not_answer_is_told_of():
    async def look():
        engine = FakeEngine(view())
        engine.fails = True
        visit = Visit(app_of(engine), "/entropykv/events")
        await visit.start()
        await visit.event()
        told = await visit.until(lambda event: event["problem"])
        assert "did not answer" in told["problem"]
        engine.fails = False
        await visit.until(lambda event: event["problem"] is None and event["tiers"])
        await visit.leave()

    asyncio.run(look())


@pytest.mark.parametrize("name", ["nobody", "%00", "../x", "%ff%fe", "%0A%0Adata:%20{}%0A%0A"])
def test_names_that_nobody_has_are_answered_in_form(name):
    async def look():
        visit = Visit(app_of(FakeEngine(view())), f"/entropykv/events?request={name}")
        assert (await visit.start())[0] == 200
        await visit.event()
        await visit.until(lambda event: event["story"]["ended"])
        await visit.leave()
        return await ask(app_of(FakeEngine(view())), "/entropykv/events?request=" + "x" * 513)

    assert asyncio.run(look())[0] == 400
