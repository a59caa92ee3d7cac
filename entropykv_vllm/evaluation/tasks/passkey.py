# SPDX-License-Identifier: Apache-2.0
"""A pass key in filler that repeats itself: nothing else is worth keeping."""

from __future__ import annotations

import random
from typing import Any

from entropykv_vllm.evaluation.tasks.case import Case, Task
from entropykv_vllm.evaluation.tasks.grades import first_number
from entropykv_vllm.evaluation.tasks.prose import Draft, encode, in_prose

FILLER = (
    " The river is wide.",
    " The hills are low.",
    " The boats are slow.",
    " We row on.",
    " Out in the morning and home at night.",
)


def draft(rng: random.Random, depth: float) -> Draft:
    """Hide a key at `depth`."""
    number = str(rng.randrange(10_000, 100_000))
    return Draft(
        facts=[(depth, f" The pass key is {number}. Remember it. {number} is the pass key.")],
        question="\n\nWhat is the pass key?",
        primer=" The pass key is",
        answers=(number,),
    )


def build(
    tokenizer: Any,
    _: list[list[int]],
    tokens: int,
    count: int,
    seed: int,
    depths: tuple[float, float],
    aware: bool = False,
) -> list[Case]:
    """Make cases in filler instead of prose."""
    filler = [encode(tokenizer, sentence) for sentence in FILLER]
    return in_prose(draft)(tokenizer, filler, tokens, count, seed, depths, aware)


TASK = Task("passkey", "number", 12, build, first_number)
