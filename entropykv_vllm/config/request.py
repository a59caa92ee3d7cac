# SPDX-License-Identifier: Apache-2.0
"""What a request may ask for, in `vllm_xargs` of the HTTP API or `SamplingParams.extra_args`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from entropykv_vllm.config.settings import EvictionConfig
from entropykv_vllm.plan.request import AS_SERVED, Control, Spans, joined

#: The keys that are ours.
EVICTION, KEEP, PROTECT = KEYS = "kv_eviction", "kv_keep", "kv_protect"

#: How keys begin that are ours or meant to be, and those that are vLLM's.
_BEGINNING, _OTHERS = "kv_", ("kv_transfer_params", "kv_cache_report_mode")

#: The most entries of `kv_protect`.
MOST = 64

#: Policies that keep nothing older than the window, but for the first tokens.
_KEEP_NOTHING = ("sink", "window")


def asked(extra: Mapping[str, Any] | None) -> dict[str, Any]:
    """The part of a request's extra arguments that is ours, or looks as if it were."""
    ours = [key for key in extra or {} if str(key).startswith(_BEGINNING) and key not in _OTHERS]
    return {key: extra[key] for key in ours if extra and extra[key] is not None}


def without(extra: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """A request's extra arguments but for ours."""
    return {key: value for key, value in (extra or {}).items() if key not in KEYS} or None


def read(extra: Mapping[str, Any] | None, settings: EvictionConfig | None, tokens: int) -> Control:
    """What a request asks for.

    Args:
        extra: its extra arguments. All that do not begin as ours do are left alone; a server that
            evicts refuses those that do and are not, which would else be dropped without a word.
        settings: the server's; None if it does not evict.
        tokens: of the prompt.

    Raises:
        ValueError: one sentence that says what is wrong and what to do.
    """
    wish = asked(extra)
    if settings is None:
        wish = {key: value for key, value in wish.items() if key in KEYS}
    if not wish or (wish == {EVICTION: "none"} and settings is None):
        return AS_SERVED
    if settings is None:
        raise ValueError(
            f"this server does not evict: leave {' and '.join(wish)} out, or start it with "
            "--kv-eviction"
        )
    _known(wish)
    off = _off(wish.get(EVICTION), settings.policy)
    spans = _spans(wish.get(PROTECT, []), tokens)
    if off:
        if KEEP in wish:
            raise ValueError("kv_eviction 'none' keeps all tokens: leave kv_keep out")
        return Control(off=True)
    return Control(keep=_keep(wish.get(KEEP), settings), protect=spans)


def _known(wish: Mapping[str, Any]) -> None:
    for key in wish:
        if key not in KEYS:
            raise ValueError(f"a request cannot ask for {short(key)}: there are {', '.join(KEYS)}")


def _off(name: object, policy: str) -> bool:
    if name not in (None, "none", policy):
        raise ValueError(
            f"kv_eviction is {short(name)}: this server evicts with {policy}, so say '{policy}' "
            "or 'none'"
        )
    return name == "none"


def _keep(value: object, settings: EvictionConfig) -> float:
    """How many times the tokens of the server's settings are to be kept."""
    if value is None:
        return 1.0
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value <= 1:  # type: ignore[operator]
        raise ValueError(f"kv_keep is {short(value)}: give a number above 0, at most 1")
    if settings.policy in _KEEP_NOTHING:
        raise ValueError(
            f"kv_keep has no meaning under the policy {settings.policy}, which keeps no old "
            "tokens: leave it out"
        )
    if settings.tiers and all(tier.keep is not None for tier in settings.tiers):
        raise ValueError(
            "kv_keep has no effect here, since the server's settings name the keep ratio of each "
            "tier: leave it out"
        )
    return value / settings.keep  # type: ignore[operator]


def entries_of(value: object) -> list[Any]:
    """The entries of `kv_protect`, which may be a single one."""
    entries = list(value) if isinstance(value, list | tuple) else [value]
    if len(entries) > MOST:
        raise ValueError(f"kv_protect has {len(entries)} entries: give at most {MOST}")
    return entries


def message_index(entry: object) -> int | None:
    """The index of a message, if that is what an entry of `kv_protect` is."""
    return entry if isinstance(entry, int) and not isinstance(entry, bool) else None


def _spans(value: object, tokens: int) -> Spans:
    return joined(_span(entry, tokens) for entry in entries_of(value))


def _span(entry: object, tokens: int) -> tuple[int, int]:
    if message_index(entry) is not None:
        raise ValueError(
            f"kv_protect names message {short(entry)}, and this request has no messages that "
            "could be found in its prompt: give spans of tokens such as '0:120'"
        )
    first, colon, end = entry.partition(":") if isinstance(entry, str) else ("", "", "")
    digits = [part for part in (first, end) if part]
    if not colon or any(not _is_count(part) for part in digits):
        raise ValueError(
            f"kv_protect has {short(entry)}: give the index of a message, such as 0 or -1, or a "
            "span of tokens as in Python, such as '0:120', '500:' or ':'"
        )
    span = int(first or 0), int(end or tokens)
    if not 0 <= span[0] < span[1] <= tokens:
        raise ValueError(
            f"kv_protect has {short(entry)}, which is not a span of this prompt of {tokens} "
            "tokens: start before the end, and end with the prompt at the latest"
        )
    return span


def _is_count(text: str) -> bool:
    return len(text) < 10 and text.isascii() and text.isdigit()


def short(value: object) -> str:
    """A client's value as it stands in a sentence: cut, and without what could end a line."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
