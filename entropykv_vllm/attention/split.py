# SPDX-License-Identifier: Apache-2.0
"""Block tables as the attention op reads them: cold pages, then hot ones, and no holes."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from entropykv_vllm.plan.schedule import TierPlan, hot_start


def hot_starts(plan: TierPlan, longest: int, device: torch.device | str = "cpu") -> Tensor:
    """The first token in a hot page, by the number of the boundary before a step's first token.

    Args:
        plan: the tier.
        longest: the most tokens of a request.
        device: of the result.

    Returns:
        int32 ``[longest // interval + 1]``, multiples of the page.
    """
    # A request may ask for less than a server that keeps everything.
    plan, count = replace(plan, keep=0.0), longest // plan.interval + 1
    starts = [hot_start(plan, i * plan.interval) for i in range(count)]
    return torch.tensor(starts, dtype=torch.int32, device=device)


def split(
    plan: TierPlan, starts: Tensor, block_table: Tensor, seq_lens: Tensor, query_lens: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Divide each request's pages into cold and hot ones.

    What is cold follows from the position of a step's first token, so nothing is stored. A request
    that asked not to be evicted has no cold pages: where those are quantized, the first segment of
    others has a hole at its end. Shapes follow from shapes alone, so a GPU does not wait for it and
    CUDA graphs can hold it.

    Args:
        plan: the tier.
        starts: of `hot_starts`, for requests as long as these at least.
        block_table: int32 ``[reqs, width]``, 0 = hole. Entries past a sequence are not read.
        seq_lens: int32 ``[reqs]``, tokens by position, those of this step included.
        query_lens: int32 ``[reqs]``, tokens of this step.

    Returns:
        int32 table ``[reqs, width]`` without holes, 0 past each row's pages; int32 ``[reqs]`` cold
        pages; int32 ``[reqs]`` tokens in hot pages.
    """
    before = (seq_lens - query_lens).clamp(min=0)
    hot_at = starts[(before // plan.interval).long()]
    last = plan.segment_pages - 1
    if plan.bits < 16 and last < block_table.shape[1]:
        hot_at = torch.where(block_table[:, last] == 0, hot_at, 0)
    column = torch.arange(block_table.shape[1], dtype=torch.int32, device=block_table.device)
    pages = (seq_lens + plan.page - 1) // plan.page
    kept = (column < pages[:, None]) & (block_table != 0)
    cold = (kept & (column < (hot_at // plan.page)[:, None])).sum(1, dtype=torch.int32)
    return _without_holes(block_table, kept), cold, (seq_lens - hot_at).to(torch.int32)


def _without_holes(block_table: Tensor, kept: Tensor) -> Tensor:
    """The entries that are kept, moved to the front of their rows; 0 behind them."""
    rows, width = block_table.shape
    # What goes is written in front of the row, which is cut off.
    place = kept.cumsum(1).mul_(kept)
    table = block_table.new_zeros(rows, width + 1)
    return table.scatter_(1, place, block_table)[:, 1:].contiguous()
