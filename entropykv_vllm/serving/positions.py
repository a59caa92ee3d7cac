# SPDX-License-Identifier: Apache-2.0
"""The position of the token in each slot, for the live page's text: a table beside the pages.

A cold page does not know which tokens it holds, and nothing else needs to. The table travels with
the tokens as attention masses do. A page's numbers are written once, when it gets its first token:
they follow from its place in the request's row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from entropykv_vllm.plan.schedule import TierPlan

#: In vLLM's `additional_config`: tells the workers that the page shows text.
TEXT_KEY = "entropykv_ui_text"


def wanted(vllm_config) -> bool:
    """Was the server started with --kv-eviction-ui-text?"""
    return bool((vllm_config.additional_config or {}).get(TEXT_KEY))


class Tables:
    """Of all layers of a worker: float32 ``[pages, heads, slots]``, exact up to 2**24 tokens.

    Layers of several groups may lie in the same memory, whose pages each belong to one group at a
    time, so they share a table too.
    """

    def __init__(self, plans: Iterable[TierPlan]) -> None:
        self.slots = max((max(plan.page, plan.cold) for plan in plans), default=0)
        self._tables: dict[int, Tensor] = {}

    def of(self, cache: Tensor) -> Tensor:
        """The table beside a layer's pages."""
        if cache.data_ptr() not in self._tables:
            empty = torch.zeros(*cache.shape[:2], self.slots)
            self._tables[cache.data_ptr()] = empty
        return self._tables[cache.data_ptr()]


def fill(tables: Iterable[Tensor], plan: TierPlan, pages: Sequence[int], first: int) -> None:
    """Write the positions of hot pages that lie side by side in a row, from entry `first` on."""
    start = first * plan.page
    at = torch.arange(start, start + len(pages) * plan.page, dtype=torch.float32)
    rows, where = at.view(-1, 1, plan.page), torch.tensor(pages)
    for numbers in tables:
        numbers[where, :, : plan.page] = rows


def count(tables: Iterable[Tensor], plan: TierPlan, pages: Sequence[int], old: int) -> Tensor:
    """In how many (layer, KV head) pairs each of the first `old` tokens is held by cold pages.

    Returns:
        int64 ``[old]``.
    """
    where, held = torch.tensor(pages, dtype=torch.long), torch.zeros(old, dtype=torch.long)
    for numbers in tables:
        at = numbers[where][..., : plan.cold].long().flatten()
        held += torch.bincount(at[at < old], minlength=old)
    return held
