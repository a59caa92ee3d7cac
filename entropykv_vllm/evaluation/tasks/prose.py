# SPDX-License-Identifier: Apache-2.0
"""Hides facts between the sentences of a text."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from entropykv_vllm.evaluation import prompts
from entropykv_vllm.evaluation.passages import opening
from entropykv_vllm.evaluation.tasks.case import Build, Case


@dataclass(frozen=True)
class Draft:
    """A case in words: facts and their depths, what is asked, how the answer begins."""

    facts: Sequence[tuple[float, str]]
    question: str
    primer: str
    answers: tuple[str, ...]


@dataclass(frozen=True)
class Place:
    """Prose from sentence `start` on, cut to `tokens` tokens; `aware`: question included."""

    tokenizer: Any
    sentences: list[list[int]]
    start: int
    tokens: int
    aware: bool


def in_prose(draft: Callable[[random.Random, float], Draft]) -> Build:
    """Return a task's `build`: `draft(rng, depth)` makes what is hidden at or after a depth."""

    return at_places(lambda place, depth, rng: fit(place, draft(rng, depth)))


def at_places(make: Callable[[Place, float, random.Random], Case]) -> Build:
    """Return a task's `build`: `make(place, depth, rng)` makes a case."""

    def build(
        tokenizer: Any,
        sentences: list[list[int]],
        tokens: int,
        count: int,
        seed: int,
        depths: tuple[float, float],
        aware: bool = False,
    ) -> list[Case]:
        rng = random.Random(seed)
        return [
            make(Place(tokenizer, sentences, start, tokens, aware), depth, rng)
            for start, depth in places(sentences, count, rng, depths)
        ]

    return build


def places(
    sentences: list[list[int]], count: int, rng: random.Random, depths: tuple[float, float]
) -> list[tuple[int, float]]:
    """Return a first sentence and a depth for each case, so that neither follows the other."""
    starts = [i * len(sentences) // count for i in range(count)]
    rng.shuffle(starts)
    return list(zip(starts, prompts.spread(count, *depths), strict=True))


def fit(place: Place, draft: Draft) -> Case:
    """Return the case of a draft."""
    question = encode(place.tokenizer, draft.question)
    facts = [(depth, encode(place.tokenizer, text)) for depth, text in draft.facts]
    context = hide(place, question, facts)
    primer = encode(place.tokenizer, draft.primer)
    return Case(context, question, primer, draft.answers, min(depth for depth, _ in facts))


def hide(
    place: Place, question: Sequence[int], facts: Sequence[tuple[float, list[int]]]
) -> list[int]:
    """Return prose in which each fact stands between the sentences nearest to its depth.

    It has the tokens of the place; where those count the question, which is not in it, with that.

    Raises:
        ValueError: if no room is left for prose.
    """
    first = opening(place.tokenizer)
    room = place.tokens - place.aware * len(question) - len(first)
    room -= sum(len(fact) for _, fact in facts)
    if room <= 0:
        raise ValueError(f"what is to be hidden needs {1 - room} more tokens")
    hay = prompts.haystack(place.sentences, place.start, room)
    ends = [0, *accumulate(map(len, hay))]
    after: dict[int, list[int]] = {end: [] for end in ends}
    for depth, fact in facts:
        after[min(ends, key=lambda end: abs(end - depth * room))] += fact
    pieces = zip(ends, [*hay, []], strict=True)
    return first + [token for end, piece in pieces for token in after[end] + piece]


def encode(tokenizer: Any, text: str) -> list[int]:
    """Return the token ids of a text that stands inside a prompt."""
    return list(tokenizer.encode(text, add_special_tokens=False))
