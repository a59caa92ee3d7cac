# SPDX-License-Identifier: Apache-2.0
"""A number of seven digits in one sentence."""

from __future__ import annotations

import random

from entropykv_vllm.evaluation import prompts
from entropykv_vllm.evaluation.tasks.case import Task
from entropykv_vllm.evaluation.tasks.grades import first_number
from entropykv_vllm.evaluation.tasks.prose import Draft, in_prose


def draft(rng: random.Random, depth: float) -> Draft:
    """Hide a number at `depth`."""
    number = str(rng.randrange(1_000_000, 10_000_000))
    return Draft(
        facts=[(depth, prompts.NEEDLE.format(number=number))],
        # Small models complete a sentence more surely than they answer a question.
        question="\n\nThe secret number of the lighthouse",
        primer=" is",
        answers=(number,),
    )


TASK = Task("needle", "number", 12, in_prose(draft), first_number)
