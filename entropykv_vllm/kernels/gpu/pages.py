# SPDX-License-Identifier: Apache-2.0
"""Reading tokens out of pages of any format, and moving whole heads of pages."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import cdiv

#: Words of 8 bytes that a program copies.
WORDS = 512


def pointers_to(caches: Sequence[Tensor]) -> Tensor:
    """Where the caches of some layers lie: int64 ``[layers]`` on their device.

    Raises:
        ValueError: they differ in shape, strides or dtype, or lie at addresses that 16 does not
            divide.
    """
    first = caches[0]
    for cache in caches:
        same = cache.shape == first.shape and cache.stride() == first.stride()
        if not same or cache.dtype != first.dtype or cache.device != first.device:
            raise ValueError("the caches of layers that move together must be alike")
        if cache.data_ptr() % 16:
            raise ValueError("the cache of a layer must lie at a multiple of 16 bytes")
    return _on_device(tuple(cache.data_ptr() for cache in caches), first.device)


@lru_cache(maxsize=64)
def _on_device(addresses: tuple[int, ...], device: torch.device) -> Tensor:
    """Made once for the layers of a group: a copy to the device costs more than what it says."""
    return torch.tensor(addresses, device=device)


def copy_out(caches: Sequence[Tensor], pages: Tensor) -> Tensor:
    """Copies of heads of pages.

    Args:
        caches: of the layers.
        pages: int64 ``[layers, n, heads]``.

    Returns:
        int64 ``[layers, n, heads, bytes of a head / 8]``.
    """
    packed = new_packed(caches, pages.shape[1])
    _copy(caches, pages, packed, True)
    return packed


def copy_in(caches: Sequence[Tensor], pages: Tensor, packed: Tensor) -> None:
    """Overwrite ``pages`` ``[n]``, all different, of all layers and heads; undoes `copy_out`."""
    layers, _, heads, _ = packed.shape
    _copy(caches, pages[None, :, None].expand(layers, -1, heads), packed, False)


def new_packed(caches: Sequence[Tensor], pages: int) -> Tensor:
    """Room for ``pages`` pages of each layer, as `copy_out` makes it."""
    cache = caches[0]
    head_bytes = cache.shape[2] * cache.shape[3] * cache.element_size()
    shape = len(caches), pages, cache.shape[1], head_bytes // 8
    return torch.empty(shape, dtype=torch.int64, device=cache.device)


def _copy(caches: Sequence[Tensor], pages: Tensor, packed: Tensor, out: bool) -> None:
    layers, count, heads, words = packed.shape
    cache = caches[0]
    copy_heads[heads * cdiv(words, WORDS) * count, layers](
        pointers_to(caches),
        pages,
        packed,
        *pages.stride(),
        *(stride * cache.element_size() for stride in cache.stride()[:2]),
        HEADS=heads,
        WORDS=words,
        BLOCK=WORDS,
        OUT=out,
        num_warps=4,
    )


@triton.jit
def copy_heads(
    pointers,
    pages,
    packed,
    layer_stride,
    page_stride,
    head_stride,
    page_bytes,
    head_bytes,
    HEADS: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    OUT: tl.constexpr,
):
    """A piece of a head of a page: ``[pages * pieces * heads, layers]`` programs."""
    PIECES: tl.constexpr = (WORDS + BLOCK - 1) // BLOCK
    program, layer = tl.program_id(0), tl.program_id(1)
    head, piece, at = program % HEADS, program // HEADS % PIECES, program // HEADS // PIECES
    count = tl.num_programs(0) // (HEADS * PIECES)
    cache = tl.multiple_of(tl.load(pointers + layer).to(tl.pointer_type(tl.uint8)), 16)
    page = tl.load(pages + layer * layer_stride + at * page_stride + head * head_stride)
    word = piece * BLOCK + tl.arange(0, BLOCK)
    mine = (cache + page * page_bytes + head.to(tl.int64) * head_bytes).to(
        tl.pointer_type(tl.int64)
    )
    copy = packed + ((layer * count + at).to(tl.int64) * HEADS + head) * WORDS
    if OUT:
        tl.store(copy + word, tl.load(mine + word, mask=word < WORDS), mask=word < WORDS)
    else:
        tl.store(mine + word, tl.load(copy + word, mask=word < WORDS), mask=word < WORDS)


@triton.jit
def load_half(
    region,
    at,
    channel,
    here,
    scale,
    zero,
    BITS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HIGH: tl.constexpr,
):
    """Half the channels of quantized tokens, float32 ``[tokens, channels]``, as `dequantize`."""
    if BITS == 4:
        both = tl.load(region + at * (HEAD_SIZE // 2) + channel, mask=here, other=0)
        code = (both >> 4 if HIGH else both & 15).to(tl.float32)
    else:
        codes = region.to(tl.pointer_type(tl.int8))
        code = tl.load(
            codes + at * HEAD_SIZE + channel + HIGH * (HEAD_SIZE // 2), mask=here, other=0
        )
        code = code.to(tl.float32)
    return zero.to(tl.float32) + scale.to(tl.float32) * code


@triton.jit
def load_tokens(
    head,
    page,
    offset,
    channel,
    here,
    page_bytes,
    BITS: tl.constexpr,
    CAPACITY: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    KIND: tl.constexpr,
):
    """Keys and values of tokens anywhere: the low and high halves of each, float32.

    Args:
        head: uint8 pointer to the KV head in page 0.
        page: int64 ``[tokens, 1]``, and ``offset``, the place in the page.
        channel: ``[1, HALF]``.
        here: ``[tokens, HALF]``; elsewhere nothing is read.
    """
    HALF_SIZE: tl.constexpr = HEAD_SIZE // 2
    start = head + page * page_bytes
    if BITS == 16:
        row = start.to(tl.pointer_type(KIND)) + offset * (2 * HEAD_SIZE) + channel
        key_low = tl.load(row, mask=here, other=0).to(tl.float32)
        key_high = tl.load(row + HALF_SIZE, mask=here, other=0).to(tl.float32)
        value_low = tl.load(row + HEAD_SIZE, mask=here, other=0).to(tl.float32)
        value_high = tl.load(row + HEAD_SIZE + HALF_SIZE, mask=here, other=0).to(tl.float32)
    else:
        CODES: tl.constexpr = CAPACITY * HEAD_SIZE * BITS // 8
        ZERO: tl.constexpr = (CAPACITY + GROUP - 1) // GROUP * HEAD_SIZE
        floats = (start + 2 * CODES).to(tl.pointer_type(tl.float16))
        mine = floats + (offset // GROUP) * HEAD_SIZE + channel
        scale, zero = tl.load(mine, mask=here, other=0), tl.load(mine + ZERO, mask=here, other=0)
        key_low = load_half(start, offset, channel, here, scale, zero, BITS, HEAD_SIZE, 0)
        scale = tl.load(mine + HALF_SIZE, mask=here, other=0)
        zero = tl.load(mine + ZERO + HALF_SIZE, mask=here, other=0)
        key_high = load_half(start, offset, channel, here, scale, zero, BITS, HEAD_SIZE, 1)
        mine = floats + 2 * ZERO + offset + channel * 0
        scale, zero = (
            tl.load(mine, mask=here, other=0),
            tl.load(mine + CAPACITY, mask=here, other=0),
        )
        values = start + CODES
        value_low = load_half(values, offset, channel, here, scale, zero, BITS, HEAD_SIZE, 0)
        value_high = load_half(values, offset, channel, here, scale, zero, BITS, HEAD_SIZE, 1)
    return key_low, key_high, value_low, value_high
