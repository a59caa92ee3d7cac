# SPDX-License-Identifier: Apache-2.0
"""What an answer is worth: the number, its digits, its form; and how sure a share is."""

import math
import random
import re

# A comma joins as thousands are written; else it stands between numbers.
NUMBER = re.compile(r"\d{1,3}(?:,\d{3})+(?!\d)|\d+")


def found(answer: str) -> str:
    """Return the digits of the first number in an answer, thousands separators dropped."""
    match = NUMBER.search(answer)
    return match.group().replace(",", "") if match else ""


def exact(answer: str, number: str) -> bool:
    """Is the first number of the answer the one asked for?"""
    return found(answer) == number


def digits(answer: str, number: str) -> float:
    """Return the share of the number's digits that stand in their place in the first number.

    No realignment: a lost digit makes those after it wrong. A random number of the same length
    scores 0.1 on average.
    """
    return sum(a == b for a, b in zip(found(answer), number, strict=False)) / len(number)


def form(answer: str, number: str) -> bool:
    """Is the first number of the answer as long as the one asked for, give or take one digit?"""
    return abs(len(found(answer)) - len(number)) <= 1


def wilson(hits: int, trials: int, z: float = 1.96) -> tuple[float, float]:
    """Return the 95 % Wilson interval of a share."""
    if trials == 0:
        return 0.0, 1.0
    share, scale = hits / trials, 1 + z * z / trials
    middle = (share + z * z / (2 * trials)) / scale
    half = z / scale * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    # Rounding must not push a share of 0 or 1 out of its interval.
    return min(share, max(0.0, middle - half)), max(share, min(1.0, middle + half))


def bootstrap(values: list[float], rounds: int = 2000, seed: int = 0) -> tuple[float, float]:
    """Return the 95 % percentile interval of a mean, by resampling the prompts."""
    rng, n = random.Random(seed), len(values)
    means = sorted(sum(rng.choices(values, k=n)) / n for _ in range(rounds))
    return means[int(0.025 * rounds)], means[int(0.975 * rounds)]


def summary(answers: list[str], numbers: list[str]) -> dict[str, list[float]]:
    """Return `[share, low, high]` of exact answers, right digits and right form."""
    pairs = list(zip(answers, numbers, strict=True))
    right = sum(exact(*pair) for pair in pairs)
    shaped = sum(form(*pair) for pair in pairs)
    parts = [digits(*pair) for pair in pairs]
    n = len(pairs)
    return {
        "exact": [right / n, *wilson(right, n)],
        "digits": [sum(parts) / n, *bootstrap(parts)],
        "form": [shaped / n, *wilson(shaped, n)],
    }
