# SPDX-License-Identifier: Apache-2.0
"""Which moves of a step can be carried out by one call on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from entropykv_vllm.pages.moves import PageMove

_Shape = tuple[int, str, int, int]


@dataclass
class _Plan:
    """Calls so far, and by page the last of them that writes it and that reads it."""

    waves: list[list[PageMove]] = field(default_factory=list)
    shapes: list[_Shape] = field(default_factory=list)
    written: dict[int, int] = field(default_factory=dict)
    read: dict[int, int] = field(default_factory=dict)

    def earliest(self, move: PageMove) -> int:
        """The first call that may hold a move.

        It is later than all that write a page of the move. Pages that the move writes may be read
        in the same call, where all reads come first.
        """
        after = [self.written[page] + 1 for page in move.src + move.dst if page in self.written]
        beside = [self.read[page] for page in move.dst if page in self.read]
        return max([0, *after, *beside])

    def add(self, move: PageMove) -> None:
        """Put a move into the first call of its shape that may hold it, else into a new one."""
        shape = move.group, move.kind, len(move.src), len(move.dst)
        wave = self.earliest(move)
        while wave < len(self.waves) and self.shapes[wave] != shape:
            wave += 1
        if wave == len(self.waves):
            self.waves.append([])
            self.shapes.append(shape)
        self.waves[wave].append(move)
        self.written |= dict.fromkeys(move.dst, wave)
        for page in move.src:
            self.read[page] = max(wave, self.read.get(page, 0))


def waves(moves: Sequence[PageMove]) -> list[list[PageMove]]:
    """Lists of moves of one shape, each for one call that reads all its pages before it writes any.

    Carried out one after the other, they leave in every page what the moves would, one by one.
    Page ids are those of the pool, so two groups' moves of one page depend on each other.

    Args:
        moves: in the order in which they were planned; those without `dst` are left out, as they
            only free pages.
    """
    plan = _Plan()
    for move in moves:
        if move.dst:
            plan.add(move)
    return plan.waves


def apart(moves: Sequence[PageMove]) -> bool:
    """Whether no page that is written by a call is read by it, so that it may write at once."""
    return {page for move in moves for page in move.src}.isdisjoint(
        page for move in moves for page in move.dst
    )
