# SPDX-License-Identifier: Apache-2.0
"""Asks the workers once a second while somebody looks, and tells all who look."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any

from vllm.logger import init_logger

from entropykv_vllm.page import merge
from entropykv_vllm.page.history import HISTORY, History
from entropykv_vllm.page.merge import Held
from entropykv_vllm.page.words import Words, tokens_of

logger = init_logger("vllm.entropykv")

#: Seconds between two messages to a browser, and at least between two questions to the workers.
PERIOD = 1.0
#: Browsers at a time; each may look at one request.
MOST_VIEWERS = 16
#: Seconds after which a browser must come again.
LONGEST = 3600.0
#: Pieces of text in a message.
MOST_PIECES = 8192

Message = dict[str, Any]


@dataclass
class Story:
    """A request that somebody looks at. `known` is its serial and boundary as last told."""

    known: list[int] = field(default_factory=lambda: [0, -1])
    end: int = 0
    ended: bool = False
    tiers: dict[str, Held] = field(default_factory=dict)
    words: Words | None = None


@dataclass(eq=False)
class Viewer:
    """A browser: the request it looks at, and what it was told of it."""

    chosen: str | None
    known: list[int] = field(default_factory=lambda: [0, -1])
    pieces: int = 0
    second: int = 0


class Hub:
    """One for a server. Viewers are told what is known; one question is under way at a time."""

    def __init__(
        self,
        engine: Any,
        text: bool = False,
        history: History = HISTORY,
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        """`engine` is vLLM's `EngineClient`; `stopping` ends all streams."""
        self.engine, self.text, self.history, self.stopping = engine, text, history, stopping
        self.viewers: set[Viewer] = set()
        self.stories: dict[str, Story] = {}
        self.tiers: list[dict[str, Any]] = []
        self.requests: list[dict[str, Any]] = []
        self.total = 0
        self.problem: str | None = None
        self._asking: asyncio.Task[None] | None = None

    def enter(self, chosen: str | None) -> Viewer | None:
        """Let a viewer in, who must leave again; None if there are too many."""
        if len(self.viewers) >= MOST_VIEWERS:
            return None
        self.viewers.add(viewer := Viewer(chosen))
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask_while_viewed())
        return viewer

    def leave(self, viewer: Viewer) -> None:
        """Take a viewer out; nothing is asked once the last has left."""
        self.viewers.discard(viewer)

    async def messages(self, viewer: Viewer) -> AsyncGenerator[Message]:
        """What a viewer is told, a message a period, until the server stops or an hour is over."""
        end = time.monotonic() + LONGEST
        while time.monotonic() < end and not self.stopping():
            yield self._message(viewer)
            await asyncio.sleep(PERIOD)

    # -- asking --------------------------------------------------------------------------------

    async def _ask_while_viewed(self) -> None:
        while self.viewers and not self.stopping():
            try:
                await self._ask()
                self.problem = None
            except Exception as error:
                logger.debug("EntropyKV: the page's question was not answered: %r", error)
                self.problem = "The engine did not answer the last question of this page."
            await asyncio.sleep(PERIOD)

    async def _ask(self) -> None:
        chosen = {viewer.chosen for viewer in self.viewers if viewer.chosen is not None}
        self.stories = {name: self.stories.get(name, Story()) for name in chosen}
        known = {name: story.known for name, story in self.stories.items()}
        # Together, since each waits for the end of a step.
        _, answers = await asyncio.gather(
            self._ask_tiers(), self.engine.collective_rpc("entropykv_look", args=(known,))
        )
        self.requests, self.total = answers[0]["requests"], answers[0]["total"]
        for name, story in self.stories.items():
            self._hear(story, merge.told(answers, name))
            if self.text and not story.ended:
                await self._read(name, story)

    async def _ask_tiers(self) -> None:
        if not self.tiers:
            self.tiers = merge.tiers(await self.engine.collective_rpc("entropykv_tiers"))

    @staticmethod
    def _hear(story: Story, told: merge.Told | None) -> None:
        story.ended = told is None
        if told is None:
            return
        if told.serial != story.known[0]:
            story.words = None
        story.end = told.end
        if told.whole:
            story.known, story.tiers = [told.serial, told.at], told.tiers
        for name, held in told.tiers.items():
            if name in story.tiers:
                story.tiers[name].tokens = held.tokens

    async def _read(self, request_id: str, story: Story) -> None:
        """Turn new tokens of a request to text, in a thread; not all tokens have one."""
        tokens = tokens_of(self.engine, request_id)
        if tokens is None:
            return
        try:
            story.words = story.words or Words(self.engine.get_tokenizer())
            await asyncio.to_thread(story.words.read, tokens)
        except Exception as error:
            logger.debug("EntropyKV: no text of request %s: %r", request_id, error)

    # -- telling -------------------------------------------------------------------------------

    def _message(self, viewer: Viewer) -> Message:
        message: Message = {
            "now": int(time.time()),
            "samples": self._samples(viewer),
            "tiers": self.tiers,
            "requests": self.requests,
            "total": self.total,
            "problem": self.problem,
        }
        if viewer.chosen is not None:
            message["story"] = self._tell(viewer, self.stories.get(viewer.chosen))
        return message

    def _samples(self, viewer: Viewer) -> list[Message]:
        """Those that the viewer has not seen, and the last one, which may have grown since."""
        newest = islice(reversed(self.history.samples), len(self.history.samples))
        unseen = []
        for sample in newest:
            if sample.second < viewer.second:
                break
            unseen.append(asdict(sample))
        if unseen:
            viewer.second = unseen[0]["second"]
        return unseen[::-1]

    def _tell(self, viewer: Viewer, story: Story | None) -> Message:
        assert viewer.chosen is not None
        if story is None or story.known[0] == 0:
            return {"id": viewer.chosen, "ended": story is not None and story.ended}
        if story.known[0] != viewer.known[0]:
            viewer.pieces = 0
        changed, viewer.known = story.known != viewer.known, story.known
        message: Message = {
            "id": viewer.chosen,
            "serial": story.known[0],
            "ended": story.ended,
            "end": story.end,
            "tiers": {name: _tier(held, changed) for name, held in story.tiers.items()},
        }
        if story.words is not None:
            pieces = story.words.pieces[viewer.pieces : viewer.pieces + MOST_PIECES]
            message["text"] = {"first": viewer.pieces, "pieces": pieces}
            viewer.pieces += len(pieces)
        return message


def _tier(held: Held, changed: bool) -> Message:
    message: Message = {"hot": held.hot, "tokens": held.tokens}
    if changed:
        shares = held.shares
        message["bands"] = held.bands
        message["shares"] = None if shares is None else base64.b64encode(shares).decode()
    return message
