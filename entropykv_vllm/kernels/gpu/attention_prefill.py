# SPDX-License-Identifier: Apache-2.0
"""Attention of requests with several new tokens: blocks of query rows, each over all it sees.

A program takes some new tokens of a request, with all query heads of a KV head: columns of the
products, as in decoding, only more of them. Tokens see all cold pages, and hot ones up to
themselves. What a row computes follows from its own tiles, wherever the chunk of the prompt begins:
a tile that it does not see changes none of its numbers.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton import cdiv, next_power_of_2

from entropykv_vllm.kernels.gpu.attention_tiles import TILE, over_pages
from entropykv_vllm.kernels.gpu.launch import (
    dot_type,
    format_of,
    interpreted,
    is_turing,
    kind_of,
    units,
)

#: Query rows of a program, at most: tokens times the query heads of a KV head.
ROWS = 64


def prefill(
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
    longest: int,
) -> None:
    """`kernels.reference.attention` of the requests with more than one new token.

    Args:
        longest: no request has more new tokens than this; the rest as there.
    """
    heads, query_heads = cache.shape[1], query.shape[1]
    queries, layout = query_heads // heads, format_of(cache, bits)
    rows = rows_of(queries, layout["HALF"], is_turing(cache.device))
    attend_blocks[cdiv(longest, rows // queries), heads, len(cold)](
        query,
        cache,
        output,
        starts,
        table,
        cold,
        hot,
        sinks,
        *query.stride()[:2],
        *output.stride()[:2],
        *cache.stride()[:2],
        table.stride(0),
        *units(scale, softcap),
        **layout,
        TILE=TILE,
        QUERIES=queries,
        ROWS=rows,
        CAPPED=softcap != 0,
        KIND=kind_of(cache.dtype),
        DOT=dot_type(cache.dtype),
        num_warps=8,
        num_stages=2,
    )


def rows_of(queries: int, half: int, turing: bool) -> int:
    """Query rows of a program, at least the query heads of a KV head.

    Half as many for heads above 128 channels, and on Turing: so tiles fit the shared memory (64 KB
    there, 99 KB on the smaller of later cards), and sums the registers.

    Args:
        queries: query heads of a KV head.
        half: channels of half a head, padded.
        turing: whether the GPU is of that generation.
    """
    rows = ROWS // (2 if half > 64 else 1) // (2 if turing else 1)
    return max(next_power_of_2(queries), 16 if interpreted() else rows)


@triton.jit
def attend_blocks(
    query,
    cache,
    output,
    starts,
    table,
    cold,
    hot,
    sinks,
    query_stride,
    query_head_stride,
    output_stride,
    output_head_stride,
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
    TILE: tl.constexpr,
    QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
    CAPPED: tl.constexpr,
    KIND: tl.constexpr,
    DOT: tl.constexpr,
):
    """Some new tokens of one KV head of one request: ``[blocks, heads, requests]`` programs."""
    block, head, request = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    BLOCK: tl.constexpr = ROWS // QUERIES
    start = tl.load(starts + request)
    new = tl.load(starts + request + 1) - start
    if new <= 1 or block * BLOCK >= new:
        return

    HALF_SIZE: tl.constexpr = HEAD_SIZE // 2
    row, channel = tl.arange(0, ROWS), tl.arange(0, HALF)
    token, head_row = block * BLOCK + row // QUERIES, head * QUERIES + row % QUERIES
    used = (token < new) & (row < BLOCK * QUERIES)
    here = used[None, :] & (channel < HALF_SIZE)[:, None]
    at = (start + token).to(tl.int64)
    mine = query + (at * query_stride + head_row * query_head_stride)[None, :] + channel[:, None]
    low = tl.load(mine, mask=here, other=0).to(tl.float32)
    high = tl.load(mine + HALF_SIZE, mask=here, other=0).to(tl.float32)

    pages = tl.load(cold + request)
    tokens = tl.load(hot + request)
    if BITS == 16:
        tokens += pages * PAGE
    position = tokens - new + token
    seen = tl.minimum(tokens, tokens - new + (block + 1) * BLOCK)
    TILES: tl.constexpr = (CAPACITY + GROUP - 1) // GROUP
    top, total, sum_low, sum_high = over_pages(
        low,
        high,
        cache + head.to(tl.int64) * head_stride,
        table + request.to(tl.int64) * table_stride,
        pages,
        0,
        pages * TILES,
        0,
        seen,
        tokens,
        position,
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
        True,
        CAPPED,
        KIND,
        DOT,
    )

    if sinks is not None:
        sink = tl.load(sinks + head_row, mask=used, other=0) * 1.4426950408889634
        new_top = tl.maximum(top, sink)
        factor = tl.exp2(top - new_top)
        total = total * factor + tl.exp2(sink - new_top)
        sum_low *= factor[None, :]
        sum_high *= factor[None, :]
    share = (1 / total)[None, :]
    mine = output + (at * output_stride + head_row * output_head_stride)[None, :] + channel[:, None]
    tl.store(mine, sum_low * share, mask=here)
    tl.store(mine + HALF_SIZE, sum_high * share, mask=here)
