# SPDX-License-Identifier: Apache-2.0
"""Four things with a number each, of which one is asked for."""

from __future__ import annotations

import random

from entropykv_vllm.evaluation.tasks.case import Task
from entropykv_vllm.evaluation.tasks.grades import first_number
from entropykv_vllm.evaluation.tasks.prose import Draft, in_prose
from entropykv_vllm.evaluation.tasks.vocabulary import PLACES

KEYS = 4


def draft(rng: random.Random, depth: float) -> Draft:
    """Hide the number asked for at `depth`, and the others anywhere."""
    places = rng.sample(PLACES, KEYS)
    numbers = [str(rng.randrange(1_000_000, 10_000_000)) for _ in places]
    depths = [depth, *(rng.random() for _ in places[1:])]
    facts = [
        (at, f" The secret number of the {place} is {number}.")
        for at, place, number in zip(depths, places, numbers, strict=True)
    ]
    return Draft(
        facts=facts,
        question=f"\n\nWhat is the secret number of the {places[0]}?",
        primer=f" The secret number of the {places[0]} is",
        answers=(numbers[0],),
    )


TASK = Task("multikey", "number", 12, in_prose(draft), first_number)
