# SPDX-License-Identifier: Apache-2.0
"""What requests ask for in our fields, good and bad; and which of it is wrong.

`wrong` is written from docs/per-request.md, not from the product.
"""

from __future__ import annotations

import random
import re
from typing import Any

POLICY = "entropykv"
KEYS = ("kv_eviction", "kv_keep", "kv_protect")
MOST_ENTRIES = 64

Wish = dict[str, Any]

#: Of no use for any field.
NONSENSE: list[Any] = [
    *(None, True, False, {}, {"a": 1}, [[1]], [None], [{}], "", "\x00", "\ud800", "x" * 300),
    *(float("nan"), float("inf"), float("-inf"), 10**30, -(10**30), 1e300, 5e-324),
]
EVICTION: list[Any] = [
    *["none", POLICY] * 4,
    *("h2o", "None", "none ", 0, ["none"], f"{POLICY}\n"),
]
KEEP: list[Any] = [
    *(1, 1.0, 0.5, 0.2, 0.03, 1e-9, 0.999) * 2,
    *(0, -0.0, -1, 1.0000001, 2, "0.5", [0.5], 10**400),
]


def wish(rng: random.Random, tokens: int, messages: int) -> Wish:
    """Some of our fields, for a prompt of so many tokens and messages."""
    found: Wish = {}
    for key in rng.sample(KEYS, rng.choice([1, 1, 1, 2, 3])):
        found[key] = _value(rng, key, tokens, messages)
    if rng.random() < 0.05:
        found[rng.choice(["kv_evict", "kv_", "kv_keep ", "kv_\ud800"])] = 1
    if rng.random() < 0.05:
        found[rng.choice(["keep", "", "KV_KEEP"])] = "for others"
    return found


def _value(rng: random.Random, key: str, tokens: int, messages: int) -> Any:
    if rng.random() < 0.1:
        return rng.choice(NONSENSE)
    if key == "kv_protect":
        return _protect(rng, tokens, messages)
    return rng.choice(EVICTION if key == "kv_eviction" else KEEP)


def _protect(rng: random.Random, tokens: int, messages: int) -> Any:
    entries = [_entry(rng, tokens, messages) for _ in range(rng.choice([0, 1, 1, 1, 2, 3]))]
    if rng.random() < 0.05:
        entries = ["0:1"] * rng.choice([MOST_ENTRIES, MOST_ENTRIES + 1])
    return entries[0] if len(entries) == 1 and rng.random() < 0.2 else entries


def _entry(rng: random.Random, tokens: int, messages: int) -> Any:
    first, last = sorted(rng.sample(range(tokens + 1), 2))
    good = [f"{first}:{last}", f"{first}:", f":{last}", ":", f"0{first}:{last}"]
    bad = [
        *(f"{last}:{first}", f"{first}:{first}", f"{first}:{tokens + 1}", f"{tokens}:"),
        *(f"-3:{last}", f"{first}-{last}", f" {first}:{last}", "1:2:3", "٣:5", "a:b", "", 0.0, 1.5),
    ]
    indices: list[Any] = [0, -1, messages - 1, -messages, messages, -messages - 1, 10**20]
    return rng.choice(rng.choice([good, good, indices, bad]))


def wrong(asked: Wish, tokens: int, messages: int, typed: bool = True) -> set[str]:
    """The keys of which a refusal must name one; none if the request is to be answered.

    Args:
        asked: the extra arguments of a request.
        tokens: of its prompt.
        messages: that it has, 0 if an index of a message has no meaning.
        typed: they come in `vllm_xargs`, of which vLLM itself refuses what is neither a string, a
            number nor a list of these, and takes true for 1; else null is nothing, and true no
            number.
    """
    if typed and (nested := {key for key, value in asked.items() if not _is_flat(value)}):
        return nested
    said = {key: _one(value) if typed else value for key, value in asked.items()}
    said = {key: value for key, value in said.items() if value is not None}
    unknown = {key for key in said if key.startswith("kv_") and key not in KEYS}
    found = unknown | {
        key for key in KEYS if key in said and not _fits(key, said[key], tokens, messages)
    }
    both = {"kv_eviction", "kv_keep"}
    return both if not found and said.get("kv_eviction") == "none" and "kv_keep" in said else found


def _is_flat(value: Any) -> bool:
    items = value if isinstance(value, list) else [value]
    return all(isinstance(item, str | int | float) for item in items)


def _one(value: Any) -> Any:
    """What vLLM makes of true and false where only numbers are asked for."""
    if isinstance(value, list):
        return [_one(item) for item in value]
    return int(value) if isinstance(value, bool) else value


def _fits(key: str, value: Any, tokens: int, messages: int) -> bool:
    if key == "kv_eviction":
        return value in ("none", POLICY)
    if key == "kv_keep":
        return _is_number(value) and 0 < value <= 1
    entries = value if isinstance(value, list) else [value]
    return len(entries) <= MOST_ENTRIES and all(_is_place(x, tokens, messages) for x in entries)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_place(entry: Any, tokens: int, messages: int) -> bool:
    if isinstance(entry, int) and not isinstance(entry, bool):
        return -messages <= entry < messages
    found = re.fullmatch(r"([0-9]*):([0-9]*)", entry) if isinstance(entry, str) else None
    return found is not None and int(found[1] or 0) < int(found[2] or tokens) <= tokens


def shown(key: str) -> str:
    """A key as it stands in a sentence."""
    return ascii(key.strip())[1:-1]


def is_unsendable(value: Any) -> bool:
    """Is there a number or a string that no message to the engine can hold?"""
    if isinstance(value, dict | list):
        items = [*value, *value.values()] if isinstance(value, dict) else value
        return any(is_unsendable(item) for item in items)
    if isinstance(value, str):
        return any("\ud800" <= character <= "\udfff" for character in value)
    return isinstance(value, int) and not -(2**63) <= value < 2**64
