# SPDX-License-Identifier: Apache-2.0
"""What the scheduler tells the workers to move, before anything else of a step."""

from __future__ import annotations

from dataclasses import dataclass

from entropykv_vllm.plan.schedule import MoveKind


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
