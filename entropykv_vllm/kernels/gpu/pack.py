# SPDX-License-Identifier: Apache-2.0
"""Gathering the tokens that stay, quantizing them, and packing them into pages."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor
from triton import cdiv

from entropykv_vllm.kernels.gpu.launch import format_of, kind_of
from entropykv_vllm.kernels.gpu.pages import load_tokens, new_packed, pointers_to
from entropykv_vllm.kernels.gpu.quantize import codes_of, finite, range_of


def pack(caches: Sequence[Tensor], src: Tensor, best: Tensor, from_bits: int, bits: int) -> Tensor:
    """Pages of the best tokens of each move; the caches are only read.

    Args:
        caches: of the layers.
        src: int64 ``[moves, s]``.
        best: int64 ``[layers, moves, heads, kept]``, indices of tokens of a move.
        from_bits: 16, 8 or 4, of the pages of ``src``.
        bits: of those that are made.

    Returns:
        As `pages.copy_out`, for ``moves * m`` pages.
    """
    old, new = format_of(caches[0], from_bits), format_of(caches[0], bits)
    layers, moves, heads, kept = best.shape
    pages = kept // new["CAPACITY"]
    packed = new_packed(caches, moves * pages)
    tiles = cdiv(new["CAPACITY"], new["GROUP"])
    pack_tokens[moves * pages * tiles * heads, layers](
        pointers_to(caches),
        src,
        best,
        packed,
        src.shape[1],
        kept,
        pages,
        *(stride * caches[0].element_size() for stride in caches[0].stride()[:2]),
        **new,
        FROM_BITS=from_bits,
        FROM_CAPACITY=old["CAPACITY"],
        HEADS=heads,
        KIND=kind_of(caches[0].dtype),
        num_warps=4,
    )
    return packed


@triton.jit
def pack_tokens(
    pointers,
    src,
    best,
    packed,
    sources,
    kept,
    pages,
    page_bytes,
    head_bytes,
    BITS: tl.constexpr,
    PAGE: tl.constexpr,
    CAPACITY: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    FROM_BITS: tl.constexpr,
    FROM_CAPACITY: tl.constexpr,
    HEADS: tl.constexpr,
    KIND: tl.constexpr,
):
    """A group of 64 tokens of a page of one head: ``[pages * groups * heads, layers]`` programs."""
    TILES: tl.constexpr = (CAPACITY + GROUP - 1) // GROUP
    HEAD_BYTES: tl.constexpr = PAGE * HEAD_SIZE * 2 * (KIND.primitive_bitwidth // 8)
    HALF_SIZE: tl.constexpr = HEAD_SIZE // 2
    program, layer = tl.program_id(0), tl.program_id(1)
    head, group, made = program % HEADS, program // HEADS % TILES, program // HEADS // TILES
    move = made // pages

    token = group * GROUP + tl.arange(0, GROUP)
    real = token < CAPACITY
    all_pages = tl.num_programs(0) // (HEADS * TILES)
    row = (layer * (all_pages // pages) + move).to(tl.int64) * HEADS + head
    chosen = tl.load(best + row * kept + (made % pages) * CAPACITY + token, mask=real, other=0)
    page = tl.load(src + move * sources + chosen // FROM_CAPACITY, mask=real, other=0)
    channel = tl.arange(0, HALF)[None, :]
    here = real[:, None] & (channel < HALF_SIZE)
    cache = tl.multiple_of(tl.load(pointers + layer).to(tl.pointer_type(tl.uint8)), 16)
    key_low, key_high, value_low, value_high = load_tokens(
        cache + head.to(tl.int64) * head_bytes,
        page[:, None],
        (chosen % FROM_CAPACITY)[:, None],
        channel,
        here,
        page_bytes,
        FROM_BITS,
        FROM_CAPACITY,
        GROUP,
        HEAD_SIZE,
        KIND,
    )

    number = (layer * all_pages + made).to(tl.int64) * HEADS + head
    to = packed.to(tl.pointer_type(tl.uint8)) + number * HEAD_BYTES
    if BITS == 16:
        mine = to.to(tl.pointer_type(KIND)) + token[:, None] * (2 * HEAD_SIZE) + channel
        tl.store(mine, key_low, mask=here)
        tl.store(mine + HALF_SIZE, key_high, mask=here)
        tl.store(mine + HEAD_SIZE, value_low, mask=here)
        tl.store(mine + HEAD_SIZE + HALF_SIZE, value_high, mask=here)
    else:
        CODES: tl.constexpr = CAPACITY * HEAD_SIZE * BITS // 8
        ZERO: tl.constexpr = TILES * HEAD_SIZE
        floats = (to + 2 * CODES).to(tl.pointer_type(tl.float16))
        mine = floats + group * HEAD_SIZE + channel
        codes_low = pack_keys(key_low, here, mine, ZERO, channel < HALF_SIZE, BITS)
        codes_high = pack_keys(key_high, here, mine + HALF_SIZE, ZERO, channel < HALF_SIZE, BITS)
        store_codes(to, codes_low, codes_high, token, channel, here, BITS, HEAD_SIZE)
        value_low, value_high = finite(value_low), finite(value_high)
        low, high = tl.minimum(value_low, value_high), tl.maximum(value_low, value_high)
        low = tl.min(tl.where(here, low, float("inf")), 1)
        high = tl.max(tl.where(here, high, float("-inf")), 1)
        scale, zero = range_of(tl.where(real, low, 0.0), tl.where(real, high, 0.0), BITS)
        mine = floats + 2 * ZERO + token
        tl.store(mine, scale, mask=real)
        tl.store(mine + CAPACITY, zero, mask=real)
        codes_low = codes_of(value_low, scale[:, None], zero[:, None], BITS)
        codes_high = codes_of(value_high, scale[:, None], zero[:, None], BITS)
        store_codes(to + CODES, codes_low, codes_high, token, channel, here, BITS, HEAD_SIZE)


@triton.jit
def pack_keys(x, here, scales, ZERO: tl.constexpr, present, BITS: tl.constexpr):
    """The codes of half the channels of a group of keys; stores their scales and zeros."""
    x = finite(x)
    low = tl.min(tl.where(here, x, float("inf")), 0)[None, :]
    high = tl.max(tl.where(here, x, float("-inf")), 0)[None, :]
    scale, zero = range_of(tl.where(present, low, 0.0), tl.where(present, high, 0.0), BITS)
    tl.store(scales, scale, mask=present)
    tl.store(scales + ZERO, zero, mask=present)
    return codes_of(x, scale, zero, BITS)


@triton.jit
def store_codes(
    region, low, high, token, channel, here, BITS: tl.constexpr, HEAD_SIZE: tl.constexpr
):
    """The codes of both halves of some tokens, in rows."""
    if BITS == 4:
        mine = region + token[:, None] * (HEAD_SIZE // 2) + channel
        tl.store(mine, (low | high << 4).to(tl.uint8), mask=here)
    else:
        mine = region.to(tl.pointer_type(tl.int8)) + token[:, None] * HEAD_SIZE + channel
        tl.store(mine, low.to(tl.int8), mask=here)
        tl.store(mine + HEAD_SIZE // 2, high.to(tl.int8), mask=here)
