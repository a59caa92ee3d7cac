# SPDX-License-Identifier: Apache-2.0
"""Names of what a page holds, made by what is done to it, and what it should hold by the plan."""

from __future__ import annotations

from dataclasses import dataclass

from entropykv_vllm.pages.moves import PageMove
from entropykv_vllm.plan.schedule import Move, TierPlan, moves

#: Of tokens: the first of them are named by one number.
_MULTIPLIER, _STEP, _MASK = 6364136223846793005, 1442695040888963407, (1 << 62) - 1


def extended(prefix: int, token: int) -> int:
    """The number of a prefix, from that of the prefix without its last token."""
    return (prefix * _MULTIPLIER + (token + 1) * _STEP) & _MASK


@dataclass(frozen=True, slots=True)
class Hot:
    """Tokens in order: of which group, and of each the number of the prefix that it ends.

    The number says what was evicted before a token, too, since its keys depend on that.
    """

    group: int
    prefixes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Cold:
    """Page `index` of what a move left: who made it, by a number of all that went into it."""

    made: int
    index: int
    bits: int


class Lost:
    """Bytes that nobody may read."""

    def __repr__(self) -> str:
        return "Lost"


LOST = Lost()
ZERO = Hot(-1, ())
Content = Hot | Cold | Lost
#: What the entries of a row hold, but for its holes.
Held = dict[int, Content]


class Makers:
    """Numbers for what moves make of what they read: equal for equal inputs only."""

    def __init__(self) -> None:
        self._numbers: dict[tuple, int] = {}

    def made(self, group: int, bits: int, move: Move | PageMove, read: tuple) -> list[Content]:
        """What is in the pages that a move writes, in layers of a group that keep so many bits."""
        count = len(move.dst)
        key = group, move.kind, read, move.sinks, count
        number = self._numbers.setdefault(key, len(self._numbers))
        return [Cold(number, i, bits) for i in range(count)]

    def state(self, old: tuple) -> int:
        """A number of what all layers see of old tokens; 0 if there are none, or all are there."""
        return self._numbers.setdefault(("state", *old), len(self._numbers)) if any(old) else 0


class Expected:
    """What the rows of a tier hold, if each boundary's moves are done once and in order."""

    def __init__(self, group: int, plan: TierPlan, makers: Makers) -> None:
        self.group, self.plan, self.makers = group, plan, makers
        self._at: dict[tuple[int, int], Held] = {(0, 0): {}}

    def before(self, prefixes: list[int], start: int) -> Held:
        """What a step finds whose first token is at `start`, once its moves are done."""
        at = start // self.plan.interval * self.plan.interval
        held = dict(self._boundary(prefixes, at))
        held.update(self.hot(prefixes, at, start))
        return held

    def hot(self, prefixes: list[int], start: int, end: int) -> Held:
        """The pages of the tokens from `start`, a page's first, to `end`."""
        page = self.plan.page
        return {
            first // page: Hot(self.group, tuple(prefixes[first : min(first + page, end)]))
            for first in range(start, end, page)
        }

    def old(self, prefixes: list[int], at: int) -> tuple:
        """What was moved, at a boundary: tokens behind it are what they are because of that."""
        held = self._boundary(prefixes, at)
        return tuple((entry, one) for entry, one in held.items() if isinstance(one, Cold))

    def _boundary(self, prefixes: list[int], at: int) -> Held:
        key = at, prefixes[at - 1] if at else 0
        if key not in self._at:
            last = at - self.plan.interval
            held = dict(self._boundary(prefixes, last)) | self.hot(prefixes, last, at)
            for move in moves(self.plan, at):
                self._carry_out(held, move)
            self._at[key] = held
        return self._at[key]

    def _carry_out(self, held: Held, move: Move) -> None:
        read = tuple(held.pop(entry) for entry in move.src)
        made = self.makers.made(self.group, self.plan.bits, move, read)
        held.update({cold.entry: one for cold, one in zip(move.dst, made, strict=True)})
