# SPDX-License-Identifier: Apache-2.0
"""Block tables without their holes, so that a stock attention kernel can read them."""

import torch
from torch import Tensor


def compact(block_table: Tensor, seq_lens: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Drop the holes of each request's table and shorten its sequence by them.

    Pages move left in their order; what RoPE needs is in the keys already, so a page may stand
    anywhere before the hot ones. The last page of a request is hot and must not be a hole.

    Args:
        block_table: int32 ``[reqs, width]``, 0 = hole. Entries past a sequence are not read.
        seq_lens: int32 ``[reqs]``, tokens by position; 0 for padded rows.
        block_size: tokens of a page.

    Returns:
        A new table, 0 past each row's pages, and new lengths; or the arguments themselves where
        no row has a hole. The arguments are never written: vLLM shares them between groups.
    """
    column = torch.arange(block_table.shape[1], dtype=torch.int32, device=block_table.device)
    pages = (seq_lens + block_size - 1) // block_size
    kept = (column < pages[:, None]) & (block_table != 0)
    count = kept.sum(1, dtype=seq_lens.dtype)
    if torch.equal(count, pages):
        return block_table, seq_lens
    # Both masks run row by row and have the same number of entries in a row: order is kept.
    table = torch.zeros_like(block_table)
    table.masked_scatter_(column < count[:, None], block_table.masked_select(kept))
    return table, seq_lens - (pages - count) * block_size
