# SPDX-License-Identifier: Apache-2.0
"""A hidden word: nothing of it looks unlike the prose around it."""

from __future__ import annotations

import random

from entropykv_vllm.evaluation.tasks.case import Task
from entropykv_vllm.evaluation.tasks.grades import first_word
from entropykv_vllm.evaluation.tasks.prose import Draft, in_prose
from entropykv_vllm.evaluation.tasks.vocabulary import WORDS


def draft(rng: random.Random, depth: float) -> Draft:
    """Hide a word at `depth`."""
    word = rng.choice(WORDS)
    return Draft(
        facts=[(depth, f" The secret word of the lighthouse is {word}.")],
        question="\n\nWhat is the secret word of the lighthouse?",
        primer=" The secret word of the lighthouse is",
        answers=(word,),
    )


TASK = Task("word", "word", 8, in_prose(draft), first_word)
