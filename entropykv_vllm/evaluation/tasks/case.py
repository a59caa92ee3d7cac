# SPDX-License-Identifier: Apache-2.0
"""What a task is: how its prompts are made, and what an answer is worth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Case:
    """One prompt in token ids: `context`, `question` and `primer` one after the other.

    Question-agnostic, the `context` has as many tokens as were asked for, so that where it ends at
    a boundary, all of it is compressed before the question is read. Question-aware, context and
    question have together, and both are read before anything is compressed. The primer begins the
    answer and is always read after; it is short and never empty. `answers` must all be in the
    answer. `depth` is the place of the first of the facts, 0 at the start of the context.
    """

    context: list[int]
    question: list[int]
    primer: list[int]
    answers: tuple[str, ...]
    depth: float


class Build(Protocol):
    """Makes the prompts of a task."""

    def __call__(
        self,
        tokenizer: Any,
        sentences: list[list[int]],
        tokens: int,
        count: int,
        seed: int,
        depths: tuple[float, float],
        aware: bool = False,
        /,
    ) -> list[Case]:
        """Return `count` cases of `tokens` tokens of context (`aware`: question included).

        `sentences` are token ids, `depths` the lowest and the highest.

        Raises:
            ValueError: the tokens are too few for what is hidden in them.
        """


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
