# SPDX-License-Identifier: Apache-2.0
"""Where a chat message lies in the prompt: what changes if the message does."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import takewhile
from typing import Any

from entropykv_vllm.config.request import short

#: Stand for a message. A tokenizer may take a character apart into bytes, of which these share none
#: at their beginnings, and none at their ends: so each text has one that shares neither with it.
_MARKS = "\ue000", "\U000f0001", "\U00100042"


async def message_span(
    request: Any, index: int, prompt: Sequence[int], render: Callable[[Any], Awaitable[Any]]
) -> str:
    """The span of a message's tokens, as `kv_protect` takes it, "" if it has none.

    The prompt is rendered again with another text in the message's place, so this works with any
    chat template that does not change its mind about the rest.

    Args:
        request: a chat request.
        index: of the message; negative from the end.
        prompt: the tokens of the request as it is.
        render: vLLM's, from a request to messages and prompts.

    Raises:
        ValueError: if there is no such message, or it cannot be found; in words.
    """
    messages = list(request.messages)
    if not -len(messages) <= index < len(messages):
        raise ValueError(
            f"kv_protect names message {short(index)}, and there are {len(messages)}: count from "
            "0, or from -1 backwards"
        )
    if getattr(request, "truncate_prompt_tokens", None) is not None:
        raise ValueError(
            "kv_protect cannot find messages in a prompt that is cut: leave "
            "truncate_prompt_tokens out, or give spans of tokens"
        )
    messages[index] = _with_mark(messages[index], index)
    rendered = await render(request.model_copy(update={"messages": messages}, deep=False))
    if not isinstance(rendered, tuple):
        raise ValueError(f"kv_protect cannot find message {index}: give a span of tokens instead")
    return _difference(prompt, rendered[1][0].get("prompt_token_ids") or ())


def _with_mark(message: Any, index: int) -> dict[str, Any]:
    if not isinstance(message, Mapping) or message.get("content") is None:
        raise ValueError(
            f"kv_protect names message {index}, which has no text: give a span of tokens instead"
        )
    text = _text(message["content"]).strip().encode(errors="replace")
    return {**message, "content": next(mark for mark in _MARKS if not _alike(mark.encode(), text))}


def _text(content: Any) -> str:
    """The text of a message, which may be in parts."""
    if isinstance(content, str):
        return content
    parts = (part.get("text") if isinstance(part, Mapping) else part for part in content)
    return "".join(part for part in parts if isinstance(part, str))


def _alike(mark: bytes, text: bytes) -> bool:
    """Whether they begin or end with the same byte."""
    return mark[:1] == text[:1] or mark[-1:] == text[-1:]


def _difference(prompt: Sequence[int], other: Sequence[int]) -> str:
    """What of a prompt is not in another, but for what both begin and end with."""
    first = _common(prompt, other)
    last = min(_common(prompt[::-1], other[::-1]), min(len(prompt), len(other)) - first)
    end = len(prompt) - last
    return f"{first}:{end}" if first < end else ""


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many numbers two sequences begin with alike."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
