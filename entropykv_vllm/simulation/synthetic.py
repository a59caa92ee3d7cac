# SPDX-License-Identifier: Apache-2.0
"""Traces made up from a few numbers, always the same ones from the same numbers."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from typing import Any

from entropykv_vllm.simulation.trace import MOST, Request, in_order

#: More would fill the memory before the first is simulated.
MOST_REQUESTS = 10**6


@dataclass(frozen=True)
class Synthetic:
    """What is asked for.

    Attributes:
        requests: how many.
        prompt: tokens of a prompt, on average.
        output: tokens of an answer, on average.
        rate: requests a second, at random; 0 for all at once.
        spread: how far lengths are from the average at most, as a share of it.
        shared: tokens that the prompts of a family begin with.
        families: how many there are; a request is in one of them at random.
        seed: of all that is random.
    """

    requests: int = 256
    prompt: int = 4096
    output: int = 256
    rate: float = 1.0
    spread: float = 0.5
    shared: int = 0
    families: int = 1
    seed: int = 0


def parse_synthetic(text: str) -> Synthetic:
    """Read `requests=32 prompt=6000 output=256 rate=2 shared=1024`.

    Raises:
        ValueError: if a part is not a name and a number, or a number cannot be, in words.
    """
    kinds = {name: type(usual) for name, usual in asdict(Synthetic()).items()}
    given: dict[str, Any] = {}
    for part in text.replace(",", " ").split():
        name, _, value = part.partition("=")
        if name not in kinds:
            raise ValueError(f"--synthetic has '{part}': it takes {', '.join(kinds)}, each with =")
        try:
            given[name] = _number(value, kinds[name])
        except ValueError:
            kind = "a whole number, such as 6000 or 4k" if kinds[name] is int else "a number"
            raise ValueError(f"--synthetic has '{value}' for {name}, not {kind}") from None
    asked = Synthetic(**given)
    _check(asked)
    return asked


def _number(text: str, kind: type) -> float:
    """Read a number; k is 1,024 and m its square, as in lengths elsewhere."""
    unit = _UNITS.get(text[-1:].lower(), 1) if kind is int else 1
    return kind(text if unit == 1 else text[:-1]) * unit


_UNITS = {"k": 1 << 10, "m": 1 << 20}


def _check(asked: Synthetic) -> None:
    for name, value in asdict(asked).items():
        if not abs(value) <= MOST:  # as nan is not
            raise ValueError(f"--synthetic has {value} for {name}, which must be {MOST:g} at most")
    if asked.requests > MOST_REQUESTS:
        raise ValueError(
            f"--synthetic has {asked.requests:,} requests: at most {MOST_REQUESTS:,} are made, so "
            "give fewer"
        )
    for name in ("requests", "prompt", "output", "families"):
        if getattr(asked, name) < 1:
            raise ValueError(f"--synthetic has {getattr(asked, name)} {name}: give 1 or more")
    if asked.rate < 0 or asked.shared < 0:
        raise ValueError("--synthetic has a rate or shared tokens below 0")
    if not 0 <= asked.spread < 1:
        raise ValueError(f"--synthetic has a spread of {asked.spread}, not from 0 to below 1")


def make_synthetic(asked: Synthetic) -> list[Request]:
    """Make the trace."""
    rng, time, requests = random.Random(asked.seed), 0.0, []
    for _ in range(asked.requests):
        prompt = _length(rng, asked.prompt, asked.spread)
        shared = min(asked.shared, prompt)
        family = rng.randrange(asked.families)
        requests.append(
            Request(
                arrival=time,
                prompt=prompt,
                output=_length(rng, asked.output, asked.spread),
                shared=((shared, family),) if shared else (),
            )
        )
        time += rng.expovariate(asked.rate) if asked.rate else 0.0
    return in_order(requests)


def _length(rng: random.Random, mean: int, spread: float) -> int:
    return max(1, round(mean * rng.uniform(1 - spread, 1 + spread)))
