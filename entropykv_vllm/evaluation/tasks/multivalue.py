# SPDX-License-Identifier: Apache-2.0
"""Four numbers that belong to one thing, spread over the text and all asked for."""

from __future__ import annotations

import random

from entropykv_vllm.evaluation.tasks.case import Task
from entropykv_vllm.evaluation.tasks.grades import share_of_numbers
from entropykv_vllm.evaluation.tasks.prose import Draft, in_prose

SENTENCES = (
    "The door code of the lighthouse is",
    "The telephone number of the keeper is",
    "The price of the oil is",
    "The weight of the great lamp is",
)


def draft(rng: random.Random, depth: float) -> Draft:
    """Hide the first number at `depth`, and the others evenly between there and the end."""
    numbers = [str(rng.randrange(10_000, 100_000)) for _ in SENTENCES]
    step = (1 - depth) / len(SENTENCES)
    facts = [
        (depth + i * step, f" {sentence} {number}.")
        for i, (sentence, number) in enumerate(zip(SENTENCES, numbers, strict=True))
    ]
    return Draft(
        facts=facts,
        question="\n\nWhat are the door code of the lighthouse, the telephone number of the "
        "keeper, the price of the oil and the weight of the great lamp?",
        primer=f"\n- {SENTENCES[0]}",  # small models finish a list, and not a paragraph
        answers=tuple(numbers),
    )


TASK = Task("multivalue", "number", 72, in_prose(draft), share_of_numbers)
