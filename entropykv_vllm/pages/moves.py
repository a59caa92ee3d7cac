# SPDX-License-Identifier: Apache-2.0
"""What the scheduler tells the workers to move, before anything else of a step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from entropykv_vllm.plan.schedule import MoveKind

#: The pages of some entries of a table row, by the places of the entries; 0 is a hole.
Entries = dict[int, int]


@dataclass(frozen=True)
class PageMove:
    """One planned move of a request, with page ids.

    The tokens of the `src` pages compete, the best fill the `dst` pages, which are cold; table
    entry ``entries[i]`` becomes ``dst[i]`` where there is one, else a hole. A `kind` of "collapse"
    has hot pages as `src`, the others cold ones; of those, "drop" keeps whole pages. `order` is
    the order in which moves were planned: pages freed by one may be the `dst` of a later one.
    """

    order: int
    group: int
    request_id: str
    entries: tuple[int, ...]
    src: tuple[int, ...]
    dst: tuple[int, ...]
    sinks: int
    kind: MoveKind = "collapse"

    @property
    def rewritten(self) -> Entries:
        """What stands in the row afterwards: the survivors' pages, then holes."""
        holes = (0,) * (len(self.entries) - len(self.dst))
        return dict(zip(self.entries, self.dst + holes, strict=True))


def rewritten_rows(moves: Iterable[PageMove]) -> dict[tuple[str, int], Entries]:
    """What stands in the rows after some moves in their order, by request and page group."""
    rows: dict[tuple[str, int], Entries] = {}
    for move in moves:
        rows.setdefault((move.request_id, move.group), {}).update(move.rewritten)
    return rows
