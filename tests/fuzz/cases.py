# SPDX-License-Identifier: Apache-2.0
"""The requests of a run, each a function of the seed and its number."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urlencode

from entropykv_vllm.evaluation.server import SERVED_NAME

from . import mangle, pages
from .bases import MOST_TOKENS, Base, Body
from .schema import EACH, Schema
from .wishes import Wish, is_unsendable, shown, wish, wrong

#: How often each kind of request comes.
KINDS = {"wish": 30, "value": 20, "bytes": 12, "http": 6, "schema": 14, "against": 12, "page": 6}
#: Requests that choose among the same values of the schema.
SPAN = 500
#: Where a body says how long the answer may be, how many there are.
LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
MOST_ANSWERS = 3
_JSON = {"Content-Type": "application/json"}


@dataclass(frozen=True)
class Right:
    """Which answer is right.

    `statuses`: one of these; if none is named, all below 500 are. `words`: a refusal says one of
    them, if there are any.
    """

    statuses: tuple[int, ...] = ()
    words: tuple[str, ...] = ()


@dataclass(frozen=True)
class Case:
    """A request as it is sent; `target` is its path and query."""

    kind: str
    method: str
    target: str
    body: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=lambda: _JSON)
    right: Right = Right()

    @property
    def path(self) -> str:
        """Where it goes."""
        return self.target.partition("?")[0]


class Cases:
    """All requests of a seed."""

    def __init__(self, seed: int, schema: Schema, bases: list[Base], tokens: list[int]) -> None:
        """`tokens` are those of the bases' prompts, of the shortest if there are several."""
        self.seed, self.schema = seed, schema
        self.bases = list(zip(bases, tokens, strict=True))

    def case(self, index: int) -> Case:
        """The request of this number."""
        rng = random.Random(f"{self.seed}:{index}")
        (kind,) = rng.choices(list(KINDS), list(KINDS.values()))
        if kind == "page":
            method, target, headers, statuses, words = pages.request(rng)
            return Case(kind, method, target, None, headers, Right(statuses, words))
        if kind in ("schema", "against"):
            return self._of_schema(rng, kind, self.seed * 10**6 + index // SPAN)
        base, tokens = rng.choice(self.bases)
        return self._of_base(rng, kind, base, tokens)

    def _of_base(self, rng: random.Random, kind: str, base: Base, tokens: int) -> Case:
        asked = wish(rng, tokens, base.messages) if kind == "wish" or rng.random() < 0.2 else {}
        body = base.asking(asked) if asked else dict(base.body)
        if rng.random() < 0.4 and "batch" not in base.path:
            body["stream"] = True
        if kind == "wish":
            return Case(kind, "POST", base.path, _encoded(body), right=_right(base, tokens, asked))
        if kind == "value":
            body = tamed(mangle.with_wrong_value(rng, body))
            return Case(kind, "POST", base.path, _encoded(body))
        if kind == "bytes":
            return Case(kind, "POST", base.path, mangle.broken(rng, body))
        return _http(rng, base.path, body)

    def _of_schema(self, rng: random.Random, kind: str, batch: int) -> Case:
        path, method = rng.choice(self.schema.operations)
        number = batch * EACH + rng.randrange(EACH)
        target, query, body = self.schema.value(path, method, kind == "schema", number)
        right = Right()
        if isinstance(body, dict) and method == "post":
            body = tamed({**body, "model": SERVED_NAME} if rng.random() < 0.8 else body)
            if kind == "schema" and self.schema.takes(path, "vllm_xargs") and rng.random() < 0.4:
                asked = {k: v for k, v in wish(rng, 1, 0).items() if k != "kv_protect"}
                body["vllm_xargs"] = asked
                right = Right((400, 404)) if wrong(asked, 1, 0) else right
        if query:
            target += "?" + urlencode(query, doseq=True, errors="replace")
        target = quote(target, "/%?=&+", errors="replace")
        return Case(kind, method.upper(), target, _encoded(body), right=right)


def _http(rng: random.Random, path: str, body: Body) -> Case:
    """Another method, or another kind of content than it is."""
    if rng.random() < 0.5:
        method = rng.choice(mangle.METHODS)
        right = Right((400,) if method == mangle.NO_METHOD else (405,))
        return Case("http", method, path, _encoded(body), right=right)
    headers = {"Content-Type": rng.choice(mangle.CONTENT_TYPES)}
    return Case("http", "POST", path, _encoded(body), headers)


def _right(base: Base, tokens: int, asked: Wish) -> Right:
    if keys := wrong(asked, tokens, base.messages, base.typed):
        # Some routes refuse what no message can hold for all extra arguments at once.
        more = ("extra_args", "surrogates") if is_unsendable(asked) else ()
        if base.path == "/invocations":  # which finds no route for what no route takes
            more = (*more, "suitable handler")
        return Right((400,), (*sorted(map(shown, keys)), *more))
    if base.fits:
        return Right((200,))
    if asked.get("kv_eviction") == "none":
        return Right((400,), ("would take",))
    return Right((200, 400), ("would take",))


def tamed(body: Body) -> Body:
    """A body that asks for few answers, and short ones; other types of values stay."""
    body = dict(body)
    if isinstance(inner := body.get("sampling_params"), dict):
        body["sampling_params"] = tamed(inner)
    for name in LENGTHS:
        if _is_more(body.get(name, MOST_TOKENS + 1), MOST_TOKENS):
            body[name] = MOST_TOKENS
    for name in ("n", "best_of"):
        if name in body and _is_more(body[name], MOST_ANSWERS):
            body[name] = MOST_ANSWERS
    return body


def _is_more(value: Any, most: int) -> bool:
    """Whether the server would take a value for a number that is too large for us, or for none."""
    if isinstance(value, str) and value.strip().isdecimal():
        return True
    return value is None or (isinstance(value, int | float) and most < value < 10**6)


def _encoded(body: Any) -> bytes | None:
    if body is None or isinstance(body, bytes):
        return body
    return json.dumps(body).encode()
