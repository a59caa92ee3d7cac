# SPDX-License-Identifier: Apache-2.0
"""Requests in which all is right, one or more for each route that generates."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from entropykv_vllm.evaluation import corpus
from entropykv_vllm.evaluation.server import SERVED_NAME

from .wishes import Wish

Body = dict[str, Any]

#: Answers are kept this short.
MOST_TOKENS = 6
#: Of the prompt that does not fit into the pool unless it is evicted from.
TOO_LONG = 1600


@dataclass(frozen=True)
class Base:
    """A request that is answered, what may be asked for in it, and where.

    `messages` counts those that `kv_protect` may name; `fits` says whether the prompt fits into the
    pool without eviction, too; `prompts` counts them, all of one length.
    """

    path: str
    body: Body
    messages: int = 0
    fits: bool = True
    prompts: int = 1

    @property
    def typed(self) -> bool:
        """Our fields come in `vllm_xargs`, whose values have types."""
        return "sampling_params" not in self.body

    def asking(self, wish: Wish) -> Body:
        """The request with our fields."""
        body = copy.deepcopy(self.body)
        if self.typed:
            body["vllm_xargs"] = wish
        else:
            body["sampling_params"]["extra_args"] = wish
        return body

    def tokens(self, answer: Body) -> int:
        """Tokens of each prompt, as the server counted them."""
        if not self.typed:
            return len(self.body["token_ids"])
        used = answer["usage"]
        return (used.get("prompt_tokens") or used["input_tokens"]) // self.prompts


def bases() -> list[Base]:
    """All of them, the same each time."""
    text = corpus.text()
    made: list[Callable[[str], list[Base]]] = [_completions, _chat, _messages, _responses, _others]
    return [base for make in made for base in make(text)]


def _completions(text: str) -> list[Base]:
    path, short = "/v1/completions", {"max_tokens": 4, "temperature": 0}
    prompts = [
        "The capital of France is",
        [5, 6, 7],
        text[:1200],
        [400 + i % 90 for i in range(500)],
    ]
    too_long = [900 + i % 77 for i in range(TOO_LONG)]
    return [
        *(Base(path, _named(prompt=prompt, **short)) for prompt in prompts),
        Base(path, _named(prompt=[[5, 6, 7], [8, 9, 10]], n=2, max_tokens=2, seed=3), prompts=2),
        Base(path, _named(prompt=text[200:700], max_tokens=2, echo=True, logprobs=1)),
        Base(path, _named(prompt=too_long, **short), fits=False),
    ]


def _chat(text: str) -> list[Base]:
    short = {"max_tokens": 4, "temperature": 0}
    ask = {"role": "user", "content": "Which ship came first?"}
    turns = [
        {"role": "system", "content": text[3000:3300]},
        {"role": "user", "content": text[:900]},
        {"role": "assistant", "content": "I have read it."},
        {"role": "user", "content": [{"type": "text", "text": "Say it in"}]},
    ]
    path = "/v1/chat/completions"
    return [
        Base(path, _named(messages=[ask], **short), messages=1),
        Base(path, _named(messages=[*turns, ask], logprobs=True, **short), messages=5),
        Base(f"{path}/batch", _named(messages=[[ask], [ask]], **short), prompts=2),
    ]


def _messages(text: str) -> list[Base]:
    turns = [
        {"role": "user", "content": text[:900]},
        {"role": "assistant", "content": [{"type": "text", "text": "I have read it."}]},
        {"role": "user", "content": "And?"},
    ]
    path, short = "/v1/messages", {"max_tokens": 4, "temperature": 0}
    return [
        Base(path, _named(messages=turns[2:], **short), messages=1),
        Base(path, _named(messages=turns, system=text[500:900], **short), messages=4),
    ]


def _responses(text: str) -> list[Base]:
    path, short = "/v1/responses", {"max_output_tokens": 4, "temperature": 0}
    turns = [{"role": "user", "content": text[:900]}, {"role": "user", "content": "And?"}]
    return [
        Base(path, _named(input="The capital of France is", **short)),
        Base(path, _named(input=turns, instructions="Be brief.", **short)),
    ]


def _others(text: str) -> list[Base]:
    path, short = "/inference/v1/generate", {"max_tokens": 4, "temperature": 0}
    prompts = [[5, 6, 7], [700 + i % 80 for i in range(450)]]
    return [
        *(Base(path, _named(token_ids=ids, sampling_params={**short})) for ids in prompts),
        Base("/invocations", _named(prompt=text[:400], **short)),
    ]


def _named(**body: Any) -> Body:
    return {"model": SERVED_NAME, **body}
