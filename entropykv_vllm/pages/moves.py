# SPDX-License-Identifier: Apache-2.0
"""What the scheduler tells the workers to move, before anything else of a step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PageMove:
    """One planned move of a request, with page ids.

    The tokens of the `src` pages compete, the best fill the `dst` pages; table entry
    ``entries[i]`` becomes ``dst[i]`` where there is one, else a hole. `order` is the order in
    which moves were planned: pages freed by one may be the `dst` of a later one.
    """

    order: int
    group: int
    request_id: str
    entries: tuple[int, ...]
    src: tuple[int, ...]
    dst: tuple[int, ...]
    sinks: int
