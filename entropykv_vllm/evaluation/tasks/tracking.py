# SPDX-License-Identifier: Apache-2.0
"""A value to be reached over another fact: whose box is it, and what is in that box?"""

from __future__ import annotations

import random

from entropykv_vllm.evaluation.tasks.case import Task
from entropykv_vllm.evaluation.tasks.grades import first_number
from entropykv_vllm.evaluation.tasks.prose import Draft, in_prose

NAMES = ("Anna", "Boris", "Clara", "David", "Emma", "Felix", "Greta", "Hugo")
COLOURS = ("red", "blue", "green", "yellow", "black", "white")


def draft(rng: random.Random, depth: float) -> Draft:
    """Hide the number of a box at `depth`, and whose box it is between there and the end."""
    name, colour = rng.choice(NAMES), rng.choice(COLOURS)
    number = str(rng.randrange(10_000, 100_000))
    return Draft(
        facts=[
            (depth, f" The number in the {colour} box is {number}."),
            ((1 + depth) / 2, f" {name} owns the {colour} box."),
        ],
        question=f"\n\nWhich box does {name} own, and what is the number in the box?",
        primer=f"\n- {name} owns the",
        answers=(number,),
    )


TASK = Task("tracking", "number", 28, in_prose(draft), first_number)
