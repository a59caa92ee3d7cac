# SPDX-License-Identifier: Apache-2.0
"""Storing new tokens in hot pages."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton import next_power_of_2


def write(key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
    """As `kernels.reference.write` to pages in rows.

    Args:
        key: the last dimension contiguous, and ``value``; rows beyond those of ``slots`` are not
            read.
        cache: these and the rest as there.
    """
    if not len(slots):
        return
    head_size = cache.shape[3] // 2
    store_tokens[(len(slots),)](
        key,
        value,
        cache,
        slots,
        *key.stride()[:2],
        *value.stride()[:2],
        *cache.stride()[:2],
        PAGE=cache.shape[2],
        HEADS=cache.shape[1],
        ROWS=next_power_of_2(cache.shape[1]),
        HEAD_SIZE=head_size,
        CHANNELS=next_power_of_2(head_size),
        num_warps=4,
    )


@triton.jit
def store_tokens(
    key,
    value,
    cache,
    slots,
    key_stride,
    key_head_stride,
    value_stride,
    value_head_stride,
    page_stride,
    head_stride,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """All heads of one token: a program for each."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if slot < 0:
        return
    head, channel = tl.arange(0, ROWS)[:, None], tl.arange(0, CHANNELS)[None, :]
    here = (head < HEADS) & (channel < HEAD_SIZE)
    new_key = key + token * key_stride + head * key_head_stride + channel
    new_value = value + token * value_stride + head * value_head_stride + channel
    to = cache + (slot // PAGE) * page_stride + head.to(tl.int64) * head_stride
    to += (slot % PAGE) * (2 * HEAD_SIZE) + channel
    tl.store(to, tl.load(new_key, mask=here), mask=here)
    tl.store(to + HEAD_SIZE, tl.load(new_value, mask=here), mask=here)
