# SPDX-License-Identifier: Apache-2.0
"""Pages that a step has no business with are the same after it: checked in debug mode."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from vllm.v1.core.sched.output import SchedulerOutput

from entropykv_vllm.pages.moves import PageMove

#: Pages named in a message.
_SHOWN = 5


class Checksums:
    """Sums over the full pages of the requests in a step, until the next step.

    Args:
        runner: vLLM's V1 model runner.
        caches: the layers' pages of each page group that is a tier's, by its number.
    """

    def __init__(self, runner: Any, caches: Mapping[int, list[Tensor]]) -> None:
        self.runner, self.caches = runner, caches
        self.sums: dict[int, dict[int, int]] = {}

    def check(self, step: SchedulerOutput, moves: Iterable[PageMove]) -> None:
        """Compare what was noted after the step before, and note what is there now.

        Raises:
            RuntimeError: if a page changed that the step neither moved to nor handed out.
        """
        written = {page for move in moves for page in move.dst} | set(_handed_out(step))
        written.update(step.new_block_ids_to_zero or ())
        for group, sums in self.sums.items():
            pages = [page for page in sums if page not in written]
            wrong = [p for p, now in self._sums(group, pages).items() if now != sums[p]]
            if wrong:
                raise RuntimeError(
                    f"{len(wrong)} pages of page group {group} changed in a step that did not "
                    f"write them: {', '.join(map(str, wrong[:_SHOWN]))}"
                )
        names = step.num_scheduled_tokens
        self.sums = {g: self._sums(g, sorted(self._full(g, names))) for g in self.caches}

    def forget(self) -> None:
        """Note nothing of what is there: all pages may hold something else by the next step."""
        self.sums = {}

    def _full(self, group: int, names: Iterable[str]) -> set[int]:
        """The pages of a group that no later step adds a token to, of requests in this step.

        The runner remembers the pages of a preempted one, which are others' by now.
        """
        size = self.caches[group][0].shape[2] if self.caches[group] else 1
        return {
            page
            for request in map(self.runner.requests.__getitem__, names)
            for page in request.block_ids[group][: request.num_computed_tokens // size]
            if page
        }

    def _sums(self, group: int, pages: list[int]) -> dict[int, int]:
        total = torch.zeros(len(pages), dtype=torch.int64)
        for cache in self.caches[group] if pages else ():
            words = cache[pages].flatten(1).view(torch.int64)
            # Each word and layer counts another odd number of times: what changed places is seen.
            total = 31 * total + (words * torch.arange(1, 2 * words.shape[1], 2)).sum(1)
        return dict(zip(pages, total.tolist(), strict=True))


def _handed_out(step: SchedulerOutput) -> Iterator[int]:
    """Pages that requests get with a step."""
    for new in step.scheduled_new_reqs:
        for row in new.block_ids:
            yield from row
    for rows in step.scheduled_cached_reqs.new_block_ids:
        for row in rows or ():
            yield from row
