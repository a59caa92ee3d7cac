# SPDX-License-Identifier: Apache-2.0
"""Attention of requests with a single new token: split over the tokens, then merged.

A program takes all query heads of a KV head, so that each page is read once, and one split of a
request's tiles. How a request is split follows from its own length alone, so its numbers do not
depend on the batch: splits of `LEAST` tiles, or longer ones where that would be more than the
workspace has room for. With the default of 64 splits, one request of 32 k tokens and 8 KV heads
makes 512 programs, about 4 for each multiprocessor of a large GPU, and what goes through the
workspace is 6 % of what is read of 4 bit pages (1.5 % of 16 bit ones).

All lengths are read on the device. The grid covers the longest row that the table can hold, and
programs without work return at once, so a CUDA graph may be captured once and replayed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import cdiv, next_power_of_2

from entropykv_vllm.kernels.gpu.attention_tiles import TILE, over_pages
from entropykv_vllm.kernels.gpu.launch import dot_type, format_of, kind_of, units

#: Splits of a request that the workspace has room for, unless the caller says otherwise.
SPLITS = 64

#: Tiles that a split has at least, where a request has them: 512 tokens.
LEAST = 8

#: Rows of a tile of matrix units, to which the query heads of a KV head are padded.
ROWS = 8


class Workspace(NamedTuple):
    """What the splits of all requests leave for the merge; float32, contents are nothing.

    Attributes:
        sums: ``[requests, query_heads, splits, head_size]``, weighted sums of values.
        tops: ``[requests, query_heads, splits]``, largest logits, in base 2.
        totals: the same, sums of weights.
    """

    sums: Tensor
    tops: Tensor
    totals: Tensor


def new_workspace(
    requests: int, query_heads: int, head_size: int, device: torch.device, splits: int = SPLITS
) -> Workspace:
    """Room for as many requests, to be made once and used by all layers.

    It takes ``requests * query_heads * splits * (head_size + 2)`` times 4 bytes. A server with many
    requests wants fewer splits, since it has programs enough; but always the same number.
    """
    shape = requests, query_heads, splits
    floats = {"dtype": torch.float32, "device": device}
    return Workspace(
        torch.empty(*shape, head_size, **floats),
        torch.empty(shape, **floats),
        torch.empty(shape, **floats),
    )


def decode(
    query: Tensor,
    cache: Tensor,
    output: Tensor,
    starts: Tensor,
    table: Tensor,
    cold: Tensor,
    hot: Tensor,
    bits: int,
    scale: float,
    softcap: float,
    sinks: Tensor | None,
    workspace: Workspace,
) -> None:
    """`kernels.reference.attention` of the requests that have one new token; others are left out.

    Args:
        workspace: as of `new_workspace`, for at least as many requests; the rest as there.

    Raises:
        ValueError: the workspace is for fewer requests, or for other heads.
    """
    requests, (heads, query_heads) = len(cold), (cache.shape[1], query.shape[1])
    _check_room(workspace, requests, query)
    layout, splits = format_of(cache, bits), workspace.sums.shape[2]
    length = {"SPLITS": splits, "LEAST": LEAST, "TILE": TILE}
    most = max(cdiv(layout["CAPACITY"], TILE), cdiv(layout["PAGE"], TILE)) * table.shape[1]
    split_attention[heads, requests, min(splits, cdiv(most, LEAST))](
        query,
        cache,
        starts,
        table,
        cold,
        hot,
        *workspace,
        *query.stride()[:2],
        *cache.stride()[:2],
        table.stride(0),
        *units(scale, softcap),
        **layout,
        **length,
        QUERIES=query_heads // heads,
        ROWS=max(ROWS, next_power_of_2(query_heads // heads)),
        CAPPED=softcap != 0,
        KIND=kind_of(cache.dtype),
        DOT=dot_type(cache.dtype),
        num_warps=4,
        num_stages=3,
    )
    merge_splits[query_heads, requests](
        output,
        starts,
        cold,
        hot,
        *workspace,
        sinks,
        *output.stride()[:2],
        BITS=bits,
        PAGE=layout["PAGE"],
        CAPACITY=layout["CAPACITY"],
        HEAD_SIZE=layout["HEAD_SIZE"],
        CHANNELS=2 * layout["HALF"],
        **length,
        num_warps=4,
    )


def _check_room(workspace: Workspace, requests: int, query: Tensor) -> None:
    room, *heads, _, size = workspace.sums.shape
    if room < requests or [*heads, size] != [*query.shape[1:]]:
        raise ValueError(
            f"A workspace for {room} requests with heads {[*heads, size]} cannot serve {requests} "
            f"requests with heads {[*query.shape[1:]]}."
        )


@triton.jit
def tiles_of(
    cold,
    hot,
    BITS: tl.constexpr,
    PAGE: tl.constexpr,
    CAPACITY: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    LEAST: tl.constexpr,
):
    """How a request is split: its tiles of quantized pages, its other tokens, tiles of a split."""
    if BITS == 16:
        old = 0
        new = cold * PAGE + hot
    else:
        old = cold * ((CAPACITY + TILE - 1) // TILE)
        new = hot
    tiles = old + tl.cdiv(new, TILE)
    return old, new, tl.maximum(tl.cdiv(tiles, SPLITS), LEAST)


@triton.jit
def split_attention(
    query,
    cache,
    starts,
    table,
    cold,
    hot,
    sums,
    tops,
    totals,
    query_stride,
    query_head_stride,
    page_stride,
    head_stride,
    table_stride,
    unit,
    softcap,
    BITS: tl.constexpr,
    PAGE: tl.constexpr,
    CAPACITY: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    SPLITS: tl.constexpr,
    LEAST: tl.constexpr,
    TILE: tl.constexpr,
    QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
    CAPPED: tl.constexpr,
    KIND: tl.constexpr,
    DOT: tl.constexpr,
):
    """One split of one KV head of one request: ``[heads, requests, splits]`` programs."""
    head, request, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = tl.load(starts + request)
    if tl.load(starts + request + 1) - start != 1:
        return
    pages = tl.load(cold + request)
    old, new, length = tiles_of(
        pages, tl.load(hot + request), BITS, PAGE, CAPACITY, TILE, SPLITS, LEAST
    )
    first, last = split * length, (split + 1) * length
    if first >= old + tl.cdiv(new, TILE):
        return

    HALF_SIZE: tl.constexpr = HEAD_SIZE // 2
    row, channel = tl.arange(0, ROWS), tl.arange(0, HALF)
    here = (row < QUERIES)[None, :] & (channel < HALF_SIZE)[:, None]
    mine = query + start.to(tl.int64) * query_stride
    mine += (head * QUERIES + row)[None, :] * query_head_stride + channel[:, None]
    low = tl.load(mine, mask=here, other=0).to(tl.float32)
    high = tl.load(mine + HALF_SIZE, mask=here, other=0).to(tl.float32)

    top, total, sum_low, sum_high = over_pages(
        low,
        high,
        cache + head.to(tl.int64) * head_stride,
        table + request.to(tl.int64) * table_stride,
        pages,
        first,
        tl.minimum(last, old),
        tl.maximum(first - old, 0) * TILE,
        tl.minimum((last - old) * TILE, new),
        new,
        row,
        page_stride,
        unit,
        softcap,
        BITS,
        PAGE,
        CAPACITY,
        GROUP,
        HEAD_SIZE,
        HALF,
        TILE,
        ROWS,
        False,
        CAPPED,
        KIND,
        DOT,
    )

    used = row < QUERIES
    at = (request.to(tl.int64) * tl.num_programs(0) + head) * QUERIES + row
    at = at * SPLITS + split
    tl.store(tops + at, top, mask=used)
    tl.store(totals + at, total, mask=used)
    mine = sums + at[None, :] * HEAD_SIZE + channel[:, None]
    tl.store(mine, sum_low, mask=here)
    tl.store(mine + HALF_SIZE, sum_high, mask=here)


@triton.jit
def merge_splits(
    output,
    starts,
    cold,
    hot,
    sums,
    tops,
    totals,
    sinks,
    output_stride,
    output_head_stride,
    BITS: tl.constexpr,
    PAGE: tl.constexpr,
    CAPACITY: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    CHANNELS: tl.constexpr,
    SPLITS: tl.constexpr,
    LEAST: tl.constexpr,
    TILE: tl.constexpr,
):
    """The output of one query head of one request: ``[query_heads, requests]`` programs."""
    head, request = tl.program_id(0), tl.program_id(1)
    start = tl.load(starts + request)
    if tl.load(starts + request + 1) - start != 1:
        return
    old, new, length = tiles_of(
        tl.load(cold + request),
        tl.load(hot + request),
        BITS,
        PAGE,
        CAPACITY,
        TILE,
        SPLITS,
        LEAST,
    )
    splits = tl.cdiv(old + tl.cdiv(new, TILE), length)
    PART: tl.constexpr = 8
    at = (request.to(tl.int64) * tl.num_programs(0) + head) * SPLITS
    channel, part = tl.arange(0, CHANNELS), tl.arange(0, PART)
    top, total = float("-inf"), 0.0
    if sinks is not None:
        top, total = tl.load(sinks + head) * 1.4426950408889634, 1.0
    mixed = tl.zeros([CHANNELS], tl.float32)
    for first in range(0, splits, PART):
        split = first + part
        real = split < splits
        tops_here = tl.load(tops + at + split, mask=real, other=float("-inf"))
        new_top = tl.maximum(top, tl.max(tops_here, 0))
        weights = tl.exp2(tops_here - new_top)
        factor = tl.exp2(top - new_top)
        total_here = tl.load(totals + at + split, mask=real, other=0)
        total = total * factor + tl.sum(weights * total_here, 0)
        values = tl.load(
            sums + (at + split)[:, None] * HEAD_SIZE + channel[None, :],
            mask=real[:, None] & (channel < HEAD_SIZE)[None, :],
            other=0,
        )
        mixed = mixed * factor + tl.sum(weights[:, None] * values, 0)
        top = new_top
    mine = output + start.to(tl.int64) * output_stride + head * output_head_stride + channel
    tl.store(mine, mixed / total, mask=channel < HEAD_SIZE)
