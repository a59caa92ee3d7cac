# SPDX-License-Identifier: Apache-2.0
"""A passage of about twenty words to be repeated word for word."""

from __future__ import annotations

import random

from entropykv_vllm.evaluation.tasks.case import Task
from entropykv_vllm.evaluation.tasks.grades import words_in_order
from entropykv_vllm.evaluation.tasks.prose import Draft, in_prose
from entropykv_vllm.evaluation.tasks.vocabulary import ADJECTIVES, PEOPLE, THINGS

# {a}, {b}, {c}: adjectives; {p}, {q}: people; {x}, {y}, {z}: things
PASSAGES = (
    "The {a} {p} carried the {b} {x} over the {c} bridge, gave the {y} to a {q} and kept the {z}",
    "Before the {a} storm a {p} sold {b} {x} and {y} in the market, and the {c} {q} stole all {z}",
    "Nobody but the {a} {p} knew where {b} {x} lay, until a {c} {q} found them under {y} and {z}",
)


# Words of the passage that the primer has.
GIVEN = 3


def passage(rng: random.Random) -> str:
    """Return a passage that cannot be guessed."""
    words = rng.sample(ADJECTIVES, 3) + rng.sample(PEOPLE, 2) + rng.sample(THINGS, 3)
    return rng.choice(PASSAGES).format(**dict(zip("abcpqxyz", words, strict=True)))


def draft(rng: random.Random, depth: float) -> Draft:
    """Hide a passage at `depth`; its first words are given, so that it is found at all."""
    text = passage(rng)
    words = text.split()
    begun, rest = " ".join(words[:GIVEN]), " ".join(words[GIVEN:])
    return Draft(
        facts=[(depth, f" The letter from Lisbon said: {text}.")],
        question="\n\nWhat did the letter from Lisbon say?",
        primer=f" The letter from Lisbon said: {begun}",
        answers=(rest,),
    )


TASK = Task("copy", "text", 40, in_prose(draft), words_in_order)
