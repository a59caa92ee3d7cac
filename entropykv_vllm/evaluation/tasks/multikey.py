# SPDX-License-Identifier: Apache-2.0
"""Four things with a number each, of which one is asked for."""

from __future__ import annotations

import random

from entropykv_vllm.evaluation.tasks.case import Task
from entropykv_vllm.evaluation.tasks.grades import first_number
from entropykv_vllm.evaluation.tasks.prose import Draft, in_prose

# Worded differently, since a small model mistakes facts for each other that differ in one word.
THINGS = (
    ("the door code of the castle", " The door code of the castle is"),
    ("the telephone number of the bakery", " The telephone number of the bakery is"),
    ("the weight of the great bell", " The weight of the great bell in grams is"),
    ("the number of the sailor's ticket", " The number of the sailor's ticket is"),
    ("the price of the black horse", " The price of the black horse in pounds is"),
    ("the number of the tailor's library card", " The library card of the tailor has the number"),
    ("the number of the night train's engine", " The engine of the night train has the number"),
    ("the number that opens the treasure chest", " The treasure chest of the pirates opens with"),
)
KEYS = 4


def draft(rng: random.Random, depth: float) -> Draft:
    """Hide the number asked for at `depth`, and the others anywhere."""
    things = rng.sample(THINGS, KEYS)
    numbers = [str(rng.randrange(1_000_000, 10_000_000)) for _ in things]
    depths = [depth, *(rng.random() for _ in things[1:])]
    facts = [
        (at, f"{text} {number}.")
        for at, (_, text), number in zip(depths, things, numbers, strict=True)
    ]
    name, primer = things[0]
    return Draft(facts, f"\n\nWhat is {name}?", primer, (numbers[0],))


TASK = Task("multikey", "number", 12, in_prose(draft), first_number)
