# SPDX-License-Identifier: Apache-2.0
"""One entry out of a context that is all entries: nothing can be thrown away."""

from __future__ import annotations

import random
from itertools import product
from typing import Any

from entropykv_vllm.evaluation.tasks.case import Case, Task
from entropykv_vllm.evaluation.tasks.grades import first_number
from entropykv_vllm.evaluation.tasks.prose import Place, at_places, encode, hide
from entropykv_vllm.evaluation.tasks.vocabulary import ADJECTIVES, PEOPLE

KEYS = tuple(f"{adjective} {person}" for adjective, person in product(ADJECTIVES, PEOPLE))

# Tokens left for the question, and for prose in front of the entries.
RESERVE = 64


def entries(tokenizer: Any, tokens: int, rng: random.Random) -> list[tuple[str, str, list[int]]]:
    """Return entries of at most `tokens` tokens: key, number, token ids."""
    found: list[tuple[str, str, list[int]]] = []
    for key in rng.sample(KEYS, len(KEYS)):
        number = str(rng.randrange(10_000, 100_000))
        ids = encode(tokenizer, f"\nThe {key}: {number}")
        tokens -= len(ids)
        if tokens <= 0:
            break
        found.append((key, number, ids))
    return found


def case(place: Place, depth: float, rng: random.Random) -> Case:
    """Return a case that asks for the entry at `depth`.

    What the entries leave of the context is filled with prose at its front.
    """
    tokenizer = place.tokenizer
    found = entries(tokenizer, place.tokens - RESERVE, rng)
    if not found:
        raise ValueError(f"{place.tokens} tokens have no room for an entry")
    key, number, _ = found[min(int(depth * len(found)), len(found) - 1)]
    question = encode(tokenizer, f"\n\nWhat is the number of the {key}?")
    listed = [token for _, _, ids in found for token in ids]
    context = hide(place, question, [(1.0, listed)])
    return Case(context, question, encode(tokenizer, f"\nThe {key}:"), (number,), depth)


TASK = Task("lookup", "number", 12, at_places(case), first_number)
