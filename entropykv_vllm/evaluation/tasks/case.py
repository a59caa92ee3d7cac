# SPDX-License-Identifier: Apache-2.0
"""What a task is: how its prompts are made, and what an answer is worth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Case:
    """One prompt in token ids: `context`, `question` and `primer` one after the other.

    `context` and `question` have as many tokens as were asked for. The question is read before
    anything is compressed (question-aware) or after (question-agnostic). The primer begins the
    answer and is always read after; it is short and never empty. `answers` must all be in the
    answer. `depth` is the place of the first of the facts, 0 at the start of the context.
    """

    context: list[int]
    question: list[int]
    primer: list[int]
    answers: tuple[str, ...]
    depth: float


# (tokenizer, sentences as token ids, tokens of context and question, count, seed, (low, high))
Build = Callable[[Any, list[list[int]], int, int, int, tuple[float, float]], list[Case]]


@dataclass(frozen=True)
class Task:
    """A kind of prompt. `kind` is the form of its answers: "number", "word" or "text".

    `build` makes prompts with facts at depths spread over [low, high]; it raises ValueError if
    the tokens are too few for what is hidden in them. `grade` says what an answer to a case is
    worth, from 0 to 1.
    """

    name: str
    kind: str
    answer_tokens: int
    build: Build
    grade: Callable[[str, Case], float]
