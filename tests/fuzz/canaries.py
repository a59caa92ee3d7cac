# SPDX-License-Identifier: Apache-2.0
"""Questions with options of their own, whose answers show whose options were used."""

from __future__ import annotations

import itertools
import json
from typing import Any

from entropykv_vllm.evaluation import corpus
from entropykv_vllm.evaluation.server import SERVED_NAME

#: Characters of a prompt: past several boundaries of eviction.
CHARACTERS = 2100
#: Nats by which a choice of an answer may move with what else is computed in the same step, and by
#: which it must move with the options.
SAME, APART = 0.02, 0.1
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "none": {"kv_eviction": "none"},
    "little": {"kv_keep": 0.03},
    "protected": {"kv_keep": 0.03, "kv_protect": ["0:90"]},
}

#: The first choices for the next token, and how likely each is: nats by token.
Answer = dict[str, float]


def prompts(count: int) -> list[str]:
    """Pieces of text from several places."""
    text = corpus.text()
    return [text[start : start + CHARACTERS] for start in range(0, 9000 * count, 9000)]


def body(prompt: str, option: str) -> dict[str, Any]:
    """The question as it is asked each time."""
    return {
        **{"model": SERVED_NAME, "prompt": prompt, "max_tokens": 1, "temperature": 0},
        **{"logprobs": 5, "return_tokens_as_token_ids": True, "vllm_xargs": OPTIONS[option]},
    }


def answer(text: bytes) -> Answer:
    """What a server said of the next token."""
    (top,) = json.loads(text)["choices"][0]["logprobs"]["top_logprobs"]
    return dict(sorted(top.items(), key=lambda item: -item[1])[:5])


def distance(one: Answer, other: Answer) -> float:
    """The most by which a choice of both moves; of the last ones, one may be in one answer only."""
    if next(iter(one)) not in other or next(iter(other)) not in one:
        return float("inf")
    return max(abs(one[token] - other[token]) for token in one.keys() & other.keys())


def alike(answers: dict[str, Answer]) -> list[str]:
    """The pairs of options that answers do not tell apart: no leak would be seen."""
    pairs = itertools.combinations(OPTIONS, 2)
    return [" and ".join(p) for p in pairs if distance(answers[p[0]], answers[p[1]]) < APART]
