# SPDX-License-Identifier: Apache-2.0
"""Needles in a haystack: a number in a sentence, hidden in prose, asked for at the end."""

import random
from dataclasses import dataclass

from entropykv_vllm.evaluation.passages import opening

NEEDLE = " The secret number of the lighthouse is {number}."
QUESTION = "\n\nThe secret number of the lighthouse is"


@dataclass(frozen=True)
class Case:
    """One prompt. `depth` is the needle's place in the haystack, 0 at its start, 1 at its end."""

    number: str
    depth: float
    position: int  # tokens before the needle
    ids: list[int]


def haystack(sentences: list[list[int]], start: int, tokens: int) -> list[list[int]]:
    """Take exactly `tokens` tokens of prose from sentence `start` on, going round at the end.

    What is too much is cut from the front, so that the text before the question ends with a whole
    sentence.
    """
    taken: list[list[int]] = []
    excess = -tokens
    while excess < 0:
        taken.append(sentences[(start + len(taken)) % len(sentences)])
        excess += len(taken[-1])
    while excess >= len(taken[0]):
        excess -= len(taken.pop(0))
    return [taken[0][excess:], *taken[1:]]


def insert(hay: list[list[int]], needle: list[int], depth: float) -> tuple[list[int], int]:
    """Put the needle after the sentence that ends nearest to `depth`; return ids and position."""
    goal = depth * sum(map(len, hay))
    ends = [0]
    for sentence in hay:
        ends.append(ends[-1] + len(sentence))
    position = min(ends, key=lambda end: abs(end - goal))
    flat = [token for sentence in hay for token in sentence]
    return flat[:position] + needle + flat[position:], position


def spread(count: int, low: float = 0.0, high: float = 1.0) -> list[float]:
    """Return `count` depths evenly spread over [low, high], each in the middle of its share."""
    return [low + (high - low) * (i + 0.5) / count for i in range(count)]


def build(
    tokenizer,
    sentences: list[list[int]],
    tokens: int,
    count: int,
    seed: int = 0,
    depths: tuple[float, float] = (0.0, 1.0),
    question: str = QUESTION,
) -> list[Case]:
    """Make `count` prompts of exactly `tokens` tokens, all starting at different sentences.

    Before those comes what the model's prompts start with, which counts.
    """
    rng, first = random.Random(seed), opening(tokenizer)
    asked = tokenizer.encode(question, add_special_tokens=False)
    starts = [i * len(sentences) // count for i in range(count)]
    rng.shuffle(starts)  # else the depth would grow along the book
    cases = []
    for depth, start in zip(spread(count, *depths), starts, strict=True):
        number = str(rng.randrange(1_000_000, 10_000_000))
        needle = tokenizer.encode(NEEDLE.format(number=number), add_special_tokens=False)
        hay = haystack(sentences, start, tokens - len(first) - len(needle) - len(asked))
        ids, position = insert(hay, needle, depth)
        cases.append(Case(number, depth, len(first) + position, first + ids + asked))
    return cases


def among_numbers(tokenizer, case: Case) -> bool:
    """Is the haystack full of other numbers: more than one digit in fifty tokens?

    Scores rank tokens by what they look like, so there the needle has competitors.
    """
    text = tokenizer.decode(case.ids)
    return sum(letter.isdigit() for letter in text) > len(case.ids) / 50
