# SPDX-License-Identifier: Apache-2.0
"""Block tables as the attention op reads them: cold pages, then hot ones, and no holes."""

from __future__ import annotations

import torch
from torch import Tensor

from entropykv_vllm.plan.schedule import TierPlan, boundary, hot_start


def split(
    plan: TierPlan, block_table: Tensor, seq_lens: Tensor, query_lens: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Divide each request's pages into cold and hot ones.

    What is cold follows from the position of a step's first token alone, so nothing is stored.

    Args:
        plan: the tier.
        block_table: int32 ``[reqs, width]``, 0 = hole. Entries past a sequence are not read.
        seq_lens: int32 ``[reqs]``, tokens by position, those of this step included.
        query_lens: int32 ``[reqs]``, tokens of this step.

    Returns:
        int32 table ``[reqs, width]`` without holes, 0 past each row's pages; int32 ``[reqs]`` cold
        pages; int32 ``[reqs]`` tokens in hot pages.
    """
    starts = (seq_lens - query_lens).tolist()
    first_hot = [hot_start(plan, boundary(plan, max(0, start))) for start in starts]
    hot_at = torch.tensor(first_hot, dtype=torch.int32, device=seq_lens.device)
    column = torch.arange(block_table.shape[1], dtype=torch.int32, device=block_table.device)
    pages = (seq_lens + plan.page - 1) // plan.page
    kept = (column < pages[:, None]) & (block_table != 0)
    cold = (kept & (column < (hot_at // plan.page)[:, None])).sum(1, dtype=torch.int32)
    table = torch.zeros_like(block_table)
    # Both masks run row by row and have the same number of entries in a row: order is kept.
    table.masked_scatter_(column < kept.sum(1)[:, None], block_table.masked_select(kept))
    return table, cold, (seq_lens - hot_at).to(torch.int32)
