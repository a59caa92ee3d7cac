# SPDX-License-Identifier: Apache-2.0
"""A case that fails, made as small as it fails in the same way."""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from .case import ACTIONS, Action, Ask, Case, More, Plan, Setup
from .world import play

#: What failed: the kind of error, and the function that raised it.
Failure = tuple[str, str]


def failure(case: Case) -> Failure | None:
    """How a case fails, if it does."""
    try:
        play(case)
    except Exception as error:
        return type(error).__name__, traceback.extract_tb(error.__traceback__)[-1].name
    return None


def again(seed: int, actions: int) -> str:
    """The command that plays a case again."""
    more = "" if actions == ACTIONS else f" --actions {actions}"
    return f"python -m tests.control --seed {seed}{more}"


def shrunk(
    case: Case, found: Failure, fails: Callable[[Case], Failure | None] = failure, tries: int = 2000
) -> Case:
    """The smallest case there is to be found that still fails as `found`.

    Args:
        case: fails so.
        found: how.
        fails: plays a case.
        tries: the most cases that are played.
    """
    left = itertools.count(tries, -1)

    def still(tried: Case) -> bool:
        return next(left) > 0 and fails(tried) == found

    before = None
    while case != before:
        before = case
        case = _simpler_case(_fewer_actions(case, still), still)
    return case


def _fewer_actions(case: Case, still: Callable[[Case], bool]) -> Case:
    """Without actions that are not needed: many at a time, then fewer."""
    size = len(case.actions)
    while size:
        first = 0
        while first < len(case.actions):
            rest = case.actions[:first] + case.actions[first + size :]
            if still(tried := replace(case, actions=rest)):
                case = tried
            else:
                first += size
        size //= 2
    return case


def _simpler_case(case: Case, still: Callable[[Case], bool]) -> Case:
    """With a simpler server, and simpler actions."""
    case = _first(case, lambda c: (replace(c, setup=s) for s in _simpler_setups(c.setup)), still)
    for place in range(len(case.actions)):
        case = _first(case, partial(_simpler_at, place), still)
    return case


def _first(
    case: Case, smaller: Callable[[Case], Iterator[Case]], still: Callable[[Case], bool]
) -> Case:
    """The first of the smaller cases that fails still, and so on from there."""
    while (found := next(filter(still, smaller(case)), None)) is not None:
        case = found
    return case


def _simpler_at(place: int, case: Case) -> Iterator[Case]:
    for simpler in _simpler(case.actions[place]):
        yield replace(case, actions=(*case.actions[:place], simpler, *case.actions[place + 1 :]))


def _simpler_setups(setup: Setup) -> Iterator[Setup]:
    plain = {"windows": (), "depth": 0, "priority": False, "v2": False, "waves": False}
    for name, value in plain.items():
        if getattr(setup, name) != value and not (name == "depth" and setup.ahead):
            yield replace(setup, **{name: value})
    if setup.ahead:
        yield replace(setup, ahead=False, depth=0)
    for tier in setup.tiers if len(setup.tiers) > 1 else ():
        yield replace(setup, tiers=tuple(other for other in setup.tiers if other is not tier))


def _simpler(action: Action) -> Iterator[Action]:
    match action:
        case Plan():
            if action.budget < 1000:
                yield Plan(1000)  # as much as the server takes
        case Ask():
            plain = {"salt": 0, "stops": False, "priority": 0, "session": False, "answer": 1}
            plain |= {"off": False, "keep": None, "protect": ()}
            for name, value in plain.items():
                if getattr(action, name) != value:
                    yield replace(action, **{name: value})
            yield from _shorter(action)
        case More():
            yield from _shorter(action)


def _shorter(action: Ask | More) -> Iterator[Ask | More]:
    """With a piece of the prompt less, or one of half its length, or with a token less."""
    pieces = action.prompt
    for place, (text, count) in enumerate(pieces):
        if len(pieces) > 1:
            yield replace(action, prompt=pieces[:place] + pieces[place + 1 :])
        for less in {count // 2, count - 1} - {0}:
            yield replace(action, prompt=(*pieces[:place], (text, less), *pieces[place + 1 :]))
