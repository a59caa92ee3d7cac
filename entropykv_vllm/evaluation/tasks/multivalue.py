# SPDX-License-Identifier: Apache-2.0
"""One thing with four numbers, spread over the text and all asked for."""

from __future__ import annotations

import random

from entropykv_vllm.evaluation.tasks.case import Task
from entropykv_vllm.evaluation.tasks.grades import share_of_numbers
from entropykv_vllm.evaluation.tasks.prose import Draft, in_prose

ORDINALS = ("first", "second", "third", "fourth")


def draft(rng: random.Random, depth: float) -> Draft:
    """Hide the first number at `depth`, and the others evenly between there and the end."""
    numbers = [str(rng.randrange(10_000, 100_000)) for _ in ORDINALS]
    step = (1 - depth) / len(ORDINALS)
    facts = [
        (depth + i * step, f" The {ordinal} number of the lighthouse is {number}.")
        for i, (ordinal, number) in enumerate(zip(ORDINALS, numbers, strict=True))
    ]
    return Draft(
        facts=facts,
        question="\n\nWhat are the first, second, third and fourth number of the lighthouse?",
        primer=" The first number of the lighthouse is",
        answers=tuple(numbers),
    )


TASK = Task("multivalue", "number", 72, in_prose(draft), share_of_numbers)
