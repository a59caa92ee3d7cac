# SPDX-License-Identifier: Apache-2.0
"""What happens in a run: a server, and all that users and the clock do to it, from a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from entropykv_vllm.plan.schedule import TierPlan

from ..pages.tiers import PAGE, TIERS, random_tiers
from .contents import extended

#: Tokens that models answer, but for the one that ends an answer.
VOCABULARY, STOP = 40, 99

#: Of few kinds, so that requests that ask for the same meet.
WISHES: list[dict[str, Any]] = [
    {"off": True},
    {"keep": 0.1},
    {"keep": 1.0},
    {"protect": ((0, 20),)},
    {"protect": ((0, 20), (50, 60))},
    {"keep": 0.3, "protect": ((30, 90),)},
]

#: Of a case, unless told otherwise.
ACTIONS = 150

#: A stretch of a prompt: from which text, and how many tokens. Text -1 is what a model would say.
Piece = tuple[int, int]


@dataclass(frozen=True)
class Setup:
    """A server.

    Attributes:
        tiers, windows: its page groups, those with sliding windows last.
        slack: pages beyond the fewest that it starts with.
        longest: the most tokens of a request.
        budget: the most tokens of a step, and `seats` the most requests.
        depth: steps that may be under way when another is planned.
        waves: whether moves are carried out as on GPUs.
    """

    tiers: tuple[TierPlan, ...]
    windows: tuple[int, ...]
    slack: int
    longest: int
    budget: int
    seats: int
    caching: bool
    ahead: bool
    depth: int
    priority: bool
    v2: bool
    waves: bool


@dataclass(frozen=True)
class Ask:
    """A request comes; `salt` 0 answers as the model does, others in a way of their own.

    What it asks for: no eviction if `off`, else a share `keep` of its tokens, and spans of them.
    """

    name: str
    prompt: tuple[Piece, ...]
    answer: int
    salt: int
    stops: bool
    priority: int
    session: bool
    off: bool = False
    keep: float | None = None
    protect: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class More:
    """A session's prompt goes on."""

    name: str
    prompt: tuple[Piece, ...]
    answer: int


@dataclass(frozen=True)
class Abort:
    name: str


@dataclass(frozen=True)
class Plan:
    """A step of at most so many tokens is planned; older ones are finished first if need be."""

    budget: int


@dataclass(frozen=True)
class Finish:
    """The oldest step under way is carried out, and the scheduler told."""


@dataclass(frozen=True)
class Reset:
    """The prefix cache is emptied; running requests are started anew if `running`."""

    running: bool


Action = Ask | More | Abort | Plan | Finish | Reset


@dataclass(frozen=True)
class Case:
    setup: Setup
    actions: tuple[Action, ...]


def tokens(pieces: Sequence[Piece]) -> list[int]:
    """The tokens of a prompt; a text is read on where the piece before it ends."""
    found: list[int] = []
    prefix = 0
    for text, count in pieces:
        for _ in range(count):
            token = answered(prefix, 0) if text < 0 else (len(found) * 7 + text * 11) % VOCABULARY
            found.append(token)
            prefix = extended(prefix, token)
    return found


def answered(prefix: int, salt: int) -> int:
    """The token that a model says after a prefix."""
    return ((prefix ^ salt * 0x9E3779B97F4A7C15) >> 17) % VOCABULARY


def make_case(seed: int, length: int = ACTIONS) -> Case:
    """A server and `length` actions."""
    rng = random.Random(seed)
    setup = _setup(rng)
    return Case(setup, tuple(_action(rng, setup) for _ in range(length)))


def _setup(rng: random.Random) -> Setup:
    known = rng.random() < 0.4
    tiers = TIERS[rng.choice([*TIERS])] if known else random_tiers(rng)
    windows = rng.choice([(), (), (), (PAGE * 4 + 1,), (PAGE * 7 + 3,)])
    ahead = rng.random() < 0.6
    return Setup(
        tiers=tuple(tiers),
        windows=windows,
        slack=rng.choice([0, 0, 1, 3, 10, 40, 300]),
        longest=rng.choice([100, 160, 260]),
        budget=rng.choice([7, 33, 40, 100, 1000]),
        seats=rng.choice([1, 2, 4, 8]),
        caching=rng.random() < 0.85,
        ahead=ahead,
        depth=rng.choice([1, 2]) if ahead else rng.choice([0, 0, 1, 2]),
        priority=rng.random() < 0.3,
        v2=rng.random() < 0.4,
        waves=rng.random() < 0.5,
    )


def _action(rng: random.Random, setup: Setup) -> Action:
    kind = rng.random()
    name = f"r{rng.randrange(12)}"
    if kind < 0.22:
        return _ask(rng, setup, name)
    if kind < 0.25:
        return More(name, _prompt(rng, setup, 60), rng.randint(1, 20))
    if kind < 0.28:
        return Abort(name)
    if kind < 0.29:
        return Reset(rng.random() < 0.5)
    if kind < 0.4:
        return Finish()
    whole = rng.random() < 0.6
    return Plan(setup.budget if whole else rng.randint(1, setup.budget))


def _ask(rng: random.Random, setup: Setup, name: str) -> Ask:
    wish = rng.choice(WISHES) if rng.random() < 0.3 else {}
    return Ask(
        name=name,
        prompt=_prompt(rng, setup, setup.longest - 60),
        answer=rng.choice([1, 2, 5, rng.randint(1, 60)]),
        salt=rng.choice([0, 0, rng.randrange(1, 100)]),
        stops=rng.random() < 0.3,
        priority=rng.randrange(3),
        session=rng.random() < 0.15,
        **wish,
    )


def _prompt(rng: random.Random, setup: Setup, most: int) -> tuple[Piece, ...]:
    """Of few texts, cut where it matters, so that prompts share heads, and tails behind others."""
    interval, pieces, left = setup.tiers[0].interval, [], rng.randint(1, most)
    while left > 0 and len(pieces) < 3:
        edge = rng.choice([interval, 2 * interval, PAGE, 8 * PAGE]) + rng.choice([-1, 0, 0, 0, 1])
        count = min(left, edge if rng.random() < 0.5 else left)
        pieces.append((rng.choice([0, 0, 1, 2, -1]), count))
        left -= count
    return tuple(pieces)
