# SPDX-License-Identifier: Apache-2.0
"""What a worker can tell the live page of its requests: plain numbers, and no tokens.

Which pages of a request are hot or cold follows from its position, so all there is to keep is how
far each request is. Answers are dicts, lists and bytes, which cross to the server as they are.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from entropykv_vllm.plan.bands import bands
from entropykv_vllm.plan.request import Control, request_plan
from entropykv_vllm.plan.schedule import (
    TierPlan,
    boundary,
    cold_count,
    held_tokens,
    hot_start,
)
from entropykv_vllm.serving import positions

#: The most requests that an answer names, the oldest first.
MOST_REQUESTS = 256

#: Names are cut here, since clients choose them; a longer one can't be looked up.
LONGEST_NAME = 512


@dataclass(frozen=True)
class GroupView:
    """A page group on this worker: its plan, its layers here, and their positions if kept."""

    plan: TierPlan
    layers: Sequence[int]
    heads: int
    positions: Sequence[Tensor]


@dataclass
class Followed:
    """A request that was shown to this worker, in tokens.

    `serial` tells it from another of the same name, `asked` is how it departs from the server's
    settings. `prompt` is the prompt's length, `hit` what was found in the prefix cache, `start` and
    `end` are where its last step began and ended.
    """

    serial: int
    asked: Control
    prompt: int
    hit: int
    start: int = 0
    end: int = 0


class View:
    """Follows the steps of a worker."""

    def __init__(
        self,
        groups: Mapping[int, GroupView],
        row: Callable[[str, int], Sequence[int] | None],
        control: Callable[[Any], Control],
    ) -> None:
        """How to look further.

        Args:
            groups: by their numbers.
            row: the pages of a request in a group, 0 for holes; asked only for positions.
            control: what a `NewRequestData` asks for.
        """
        self.groups = groups
        self.requests: dict[str, Followed] = {}
        self._row, self._control = row, control
        self._serials = itertools.count(1)

    def note(self, step: Any) -> None:
        """Take in a `SchedulerOutput` that the runner has carried out."""
        for request_id in step.finished_req_ids:
            self.requests.pop(request_id, None)
        for request_id in step.preempted_req_ids or ():
            if followed := self.requests.get(request_id):
                followed.start = followed.end = 0
        for new in step.scheduled_new_reqs:
            hit, asked = new.num_computed_tokens, self._control(new)
            followed = Followed(next(self._serials), asked, new.prompt_len, hit)
            self.requests[new.req_id] = followed
            self._advance(step, new.req_id, followed, hit)
        cached = step.scheduled_cached_reqs
        for request_id, start in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            if followed := self.requests.get(request_id):
                self._advance(step, request_id, followed, start)

    def _advance(self, step: Any, request_id: str, followed: Followed, start: int) -> None:
        followed.start = start
        followed.end = start + step.num_scheduled_tokens.get(request_id, 0)
        for number, group in self.groups.items():
            if group.positions:
                self._fill(request_id, number, group, followed)

    def _fill(self, request_id: str, number: int, group: GroupView, followed: Followed) -> None:
        """Note the positions of the pages that got their first token in this step."""
        page = group.plan.page
        first, end = -(-followed.start // page), -(-followed.end // page)
        row = self._row(request_id, number) if first < end else None
        if row:
            positions.fill(group.positions, group.plan, row[first:end], first)

    def tiers(self) -> list[dict[str, Any]]:
        """The page groups: tier, layers and heads on this worker, and the plan."""
        return [
            {
                "name": group.plan.name,
                "layers": list(group.layers),
                "heads": group.heads,
                "compresses": group.plan.compresses,
                **{field: getattr(group.plan, field) for field in _PLAN_FIELDS},
            }
            for group in self.groups.values()
        ]

    def look(self, chosen: Mapping[str, Sequence[int]]) -> dict[str, Any]:
        """How far all requests are, and what is held of some.

        Args:
            chosen: request -> serial and last boundary that the caller knows; what is kept is told
                again only if they have changed.
        """
        shown = itertools.islice(self.requests.items(), MOST_REQUESTS)
        return {
            "total": len(self.requests),
            "requests": [self._request(*item) for item in shown],
            "held": {
                request_id: self._held(request_id, followed, known)
                for request_id, known in chosen.items()
                if (followed := self.requests.get(request_id))
            },
        }

    def _request(self, request_id: str, followed: Followed) -> dict[str, Any]:
        tiers: dict[str, list[float]] = {}
        for group in self.groups.values():
            plan = request_plan(group.plan, followed.asked)
            numbers = tiers.setdefault(group.plan.name, [0, 0, 0])
            for i, pages in enumerate(_pages(plan, followed)):
                numbers[i] += pages
        told = {
            name: getattr(followed, name) for name in ("serial", "prompt", "hit", "start", "end")
        }
        return {"id": request_id[:LONGEST_NAME], **told, "tiers": tiers}

    def _held(self, request_id: str, followed: Followed, known: Sequence[int]) -> dict[str, Any]:
        """What each group holds of a request: where hot tokens begin, and what is left of others.

        `bands` are the plan's, `counts` how many of the `pairs` of a layer and a KV head hold each
        old token, if positions are kept.
        """
        groups = []
        for number, group in self.groups.items():
            plan = request_plan(group.plan, followed.asked)
            at = boundary(plan, followed.start)
            old = hot_start(plan, at)
            part: dict[str, Any] = {
                "tier": group.plan.name,
                "hot": old,
                "tokens": held_tokens(plan, at, followed.end),
                "pairs": len(group.layers) * group.heads,
            }
            if list(known) != [followed.serial, at]:
                part["bands"] = [[band.first, band.end, band.share] for band in bands(plan, at)]
                part["counts"] = self._counts(request_id, number, group, old)
            groups.append(part)
        return {"serial": followed.serial, "end": followed.end, "at": at, "groups": groups}

    def _counts(self, request_id: str, number: int, group: GroupView, old: int) -> bytes | None:
        """Each old token's (layer, head) pairs that hold it, as uint16 in this machine's order."""
        row = self._row(request_id, number) if group.positions else None
        if row is None:
            return None
        pages = [page for page in row[: old // group.plan.page] if page]
        held = positions.count(group.positions, group.plan, pages, old)
        return held.numpy().astype(np.uint16).tobytes()


_PLAN_FIELDS = ("page", "cold", "segment", "interval", "window", "keep", "sinks", "cap", "bits")


def _pages(plan: TierPlan, followed: Followed) -> tuple[int, int, int]:
    """Hot pages, cold pages and holes of a request."""
    at = boundary(plan, followed.start)
    old, cold = hot_start(plan, at) // plan.page, cold_count(plan, at)
    return max(0, -(-followed.end // plan.page) - old), cold, old - cold
