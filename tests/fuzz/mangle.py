# SPDX-License-Identifier: Apache-2.0
"""What can be wrong with a request: a value of it, its JSON, its bytes, its headers."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from typing import Any

#: In the place of any value.
NASTY: list[Any] = [
    *(None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63) - 1, 10**30, 0.5, -0.0, 1e308, 5e-324),
    *(
        float("nan"),
        float("inf"),
        float("-inf"),
        "",
        " ",
        "0",
        "null",
        "\x00",
        "\ud800",
        "\udfff\ud83d",
    ),
    *("é" * 50, "‮x\u200b", "x" * 5000, [], [[]], [None], ["a", 1, {}], [0] * 300, {}, {"": None}),
    *({"type": "object"}, {"$ref": "#"}, [-1], [2**40], ["\ud800"], "data:,x", "../../etc/passwd"),
]
#: Keys that a body may have too many.
NAMES = ["", "\x00", "\ud800", "n", "stop", "messages", "prompt", "tools"]
CONTENT_TYPES = [
    *(
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "",
        "x",
    ),
    *("application/json; charset=utf-16", "application/xml", "application/json, text/plain"),
]
#: Which no server knows.
NO_METHOD = "FOO"
METHODS = ["GET", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE", NO_METHOD]


def with_wrong_value(rng: random.Random, body: dict[str, Any]) -> dict[str, Any]:
    """A body in which one to three values are others, missing or too many."""
    body = copy.deepcopy(body)
    for _ in range(rng.choice([1, 1, 2, 3])):
        holder, key = rng.choice(list(_places(body)))
        what = rng.random()
        if what < 0.1 and isinstance(holder, dict):
            del holder[key]
        elif what < 0.2 and isinstance(holder, dict):
            holder[rng.choice(NAMES)] = _nasty(rng)
        else:
            holder[key] = _nasty(rng)
        if not body:
            break
    return body


def _nasty(rng: random.Random) -> Any:
    """A copy, since it is a place for the next one."""
    return copy.deepcopy(rng.choice(NASTY))


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Where a value could be another; of long lists the first entries."""
    if isinstance(value, dict):
        keys: list[Any] = list(value)
    else:
        keys = list(range(min(len(value), 3)))
    found = [(value, key) for key in keys]
    nested = [value[key] for key in keys if isinstance(value[key], dict | list)]
    return found + [place for part in nested for place in _places(part)]


def broken(rng: random.Random, body: dict[str, Any]) -> bytes:
    """The bytes of a body, broken in one way."""
    return rng.choice(WAYS)(rng, json.dumps(body).encode())


def _cut(rng: random.Random, text: bytes) -> bytes:
    return text[: rng.randrange(len(text))]


def _flipped(rng: random.Random, text: bytes) -> bytes:
    some = bytearray(text)
    for _ in range(rng.randint(1, 4)):
        some[rng.randrange(len(some))] = rng.randrange(256)
    return bytes(some)


def _not_utf8(rng: random.Random, text: bytes) -> bytes:
    at = rng.choice([i for i, c in enumerate(text) if c == ord('"')]) + 1
    return text[:at] + rng.choice([b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xf8\x88"]) + text[at:]


def _twice(rng: random.Random, text: bytes) -> bytes:
    """Keys that stand there twice."""
    keys = ["model", "max_tokens", "prompt", "messages", "vllm_xargs", "stream"]
    more = json.dumps({rng.choice(keys): rng.choice(NASTY)}).encode()[1:-1]
    return b"{" + more + b"," + text[1:] if rng.random() < 0.5 else text[:-1] + b"," + more + b"}"


def _deep(rng: random.Random, text: bytes) -> bytes:
    depth = rng.choice([50, 500, 900, 1100, 20_000])
    nest = rng.choice([b"[" * depth + b"]" * depth, b'{"a":' * depth + b"1" + b"}" * depth])
    key = rng.choice([b"prompt", b"messages", b"vllm_xargs", b"response_format", b"x"])
    return text[:-1] + b',"' + key + b'":' + nest + b"}"


def _odd_number(rng: random.Random, text: bytes) -> bytes:
    number = rng.choice([b"NaN", b"-Infinity", b"1e999", b"9" * 5000, b"-0", b"01", b"1.", b"0x1"])
    key = rng.choice([b"temperature", b"max_tokens", b"seed", b"n", b"top_p"])
    return text[:-1] + b',"' + key + b'":' + number + b"}"


def _other(rng: random.Random, text: bytes) -> bytes:
    """Something else than an object."""
    return rng.choice([b"", b"null", b"[]", b"0", b'"x"', b"\x00" * 40, b"[" + text + b"]"])


def _wide(rng: random.Random, text: bytes) -> bytes:
    """The same text in another encoding, or with a mark before it."""
    return rng.choice([text.decode().encode("utf-16"), b"\xef\xbb\xbf" + text, text + b"\n" + text])


WAYS: list[Callable[[random.Random, bytes], bytes]] = [
    *(_cut, _flipped, _not_utf8, _twice, _deep, _odd_number, _other, _wide)
]
