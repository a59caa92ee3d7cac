# SPDX-License-Identifier: Apache-2.0
"""The page's routes: a file for each part of it, and a stream of what is going on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from importlib import resources
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from entropykv_vllm.page.guard import HEADERS, Guard
from entropykv_vllm.page.hub import Hub, Message, Viewer
from entropykv_vllm.serving.view import LONGEST_NAME

PATH = "/entropykv"
FILES = {
    "": ("page.html", "text/html"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
    "/map.js": ("map.js", "text/javascript"),
    "/story.js": ("story.js", "text/javascript"),
}
#: Seconds in which a browser must take a message.
PATIENCE = 15.0


class Stream(StreamingResponse):
    """Server-sent events to a viewer, as long as they are read."""

    def __init__(self, hub: Hub, viewer: Viewer, about: Message) -> None:
        self.events = _events(hub, viewer, about)
        self.leave = lambda: hub.leave(viewer)
        super().__init__(self.events, headers=HEADERS, media_type="text/event-stream")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def in_time(message: Any) -> None:
            await asyncio.wait_for(send(message), PATIENCE)

        with suppress(TimeoutError):
            try:
                await super().__call__(scope, receive, in_time)
            finally:
                self.leave()
                await self.events.aclose()


def router(hub: Hub, guard: Guard, about: Message) -> APIRouter:
    """The routes; `about` is what the page is told of the server, once."""
    routes = APIRouter(include_in_schema=False)
    for path, (name, kind) in FILES.items():
        routes.add_api_route(PATH + path, _file(name, kind), methods=["GET"])

    async def events(request: Request) -> Response:
        if refusal := guard.refusal(request):
            return _refuse(*refusal)
        chosen = request.query_params.get("request") or None
        if chosen is not None and len(chosen) > LONGEST_NAME:
            return _refuse(400, "no request has so long a name")
        viewer = hub.enter(chosen)
        if viewer is None:
            return _refuse(503, "too many browsers look at this page: close one")
        return Stream(hub, viewer, about)

    routes.add_api_route(f"{PATH}/events", events, methods=["GET"])
    return routes


def _file(name: str, kind: str):
    content = (resources.files("entropykv_vllm.page") / "static" / name).read_bytes()

    async def file() -> Response:
        return Response(content, headers=HEADERS, media_type=kind)

    return file


def _refuse(status: int, sentence: str) -> Response:
    return JSONResponse({"error": sentence}, status, headers=HEADERS)


async def _events(hub: Hub, viewer: Viewer, about: Message) -> AsyncGenerator[str]:
    yield _event({"about": about})
    async with aclosing(hub.messages(viewer)) as messages:
        async for message in messages:
            yield _event(message)


def _event(message: Message) -> str:
    return f"data: {json.dumps(message)}\n\n"
