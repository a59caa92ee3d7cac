# SPDX-License-Identifier: Apache-2.0
"""The scores of the tokens of moves; pages are read in Triton, the rest is torch.

A pass over keys and values gives the lengths of both; scores that compare a key with the others
take one before it, for the sum of the unit keys.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import cdiv

from entropykv_vllm.kernels.formats import cold_capacity, read_cold
from entropykv_vllm.kernels.gpu.launch import format_of, kind_of
from entropykv_vllm.kernels.gpu.pages import load_tokens, pointers_to
from entropykv_vllm.kernels.reduce import EPS, length, tree_sum
from entropykv_vllm.kernels.scores import SCORES
from entropykv_vllm.kernels.scores.entropykv import neighbourhood

#: Scores of where a token stands alone.
POSITIONS = ("sink", "window")


def token_scores(caches: Sequence[Tensor], src: Tensor, policy: str, bits: int) -> Tensor:
    """Scores of all tokens of moves, as `kernels.scores` has them up to rounding.

    Args:
        caches: of the layers.
        src: int64 ``[moves, s]``.
        policy: a name in `kernels.scores.SCORES`.
        bits: 16, 8 or 4, of the pages of ``src``.

    Returns:
        float32 ``[layers, moves, heads, tokens]``.

    Raises:
        ValueError: unknown policy.
    """
    if policy not in SCORES:
        raise ValueError(f"The policy {policy!r} is not one of {', '.join(SCORES)}.")
    if policy in POSITIONS:
        moves, heads = len(src), caches[0].shape[1]
        tokens = src.shape[1] * cold_capacity(caches[0], bits)
        nothing = caches[0].new_empty(()).expand(len(caches), moves, heads, tokens, 1)
        return SCORES[policy](nothing, nothing)
    if policy not in _FORMULAS:
        return torch.stack([_in_torch(cache, src, policy, bits) for cache in caches])
    return _FORMULAS[policy](caches, src, bits)


def _in_torch(cache: Tensor, src: Tensor, policy: str, bits: int) -> Tensor:
    """Scores that have no kernel: of whole copies of the keys and values."""
    sides = (x.transpose(1, 2).flatten(2, 3) for x in read_cold(cache, src, bits, "rows"))
    return SCORES[policy](*sides)


def _norm(caches: Sequence[Tensor], src: Tensor, bits: int) -> Tensor:
    keys, values, _ = lengths(caches, src, bits, None)
    return values / keys


def _knorm(caches: Sequence[Tensor], src: Tensor, bits: int) -> Tensor:
    return -lengths(caches, src, bits, None)[0]


def _keydiff(caches: Sequence[Tensor], src: Tensor, bits: int) -> Tensor:
    return -lengths(caches, src, bits, anchors(caches, src, bits))[2]


def _entropykv(caches: Sequence[Tensor], src: Tensor, bits: int) -> Tensor:
    _, values, cosines = lengths(caches, src, bits, anchors(caches, src, bits))
    return neighbourhood((1 - cosines).clamp(min=0) * values)


_FORMULAS = {"norm": _norm, "knorm": _knorm, "keydiff": _keydiff, "entropykv": _entropykv}


def anchors(caches: Sequence[Tensor], src: Tensor, bits: int) -> Tensor:
    """The direction of the mean of the unit keys, float32 ``[layers, moves, heads, head_size]``."""
    head_size, tiles = caches[0].shape[3] // 2, _tiles(caches, src, bits)
    shape = len(caches), len(src), caches[0].shape[1]
    sums = torch.empty(*shape, tiles, head_size, device=src.device)
    _run(sum_units, caches, src, bits, sums)
    anchor = tree_sum(sums)
    return anchor / length(anchor)[..., None]


def lengths(
    caches: Sequence[Tensor], src: Tensor, bits: int, anchor: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Lengths of keys and of values, and cosines of keys to ``anchor``.

    Returns:
        Three float32 ``[layers, moves, heads, tokens]``; without ``anchor``, the last is nothing.
    """
    tokens = src.shape[1] * cold_capacity(caches[0], bits)
    shape = 3, len(caches), len(src), caches[0].shape[1], tokens
    found = torch.empty(shape, device=src.device)
    _run(measure, caches, src, bits, found, anchor)
    keys, values = found[:2].clamp(EPS, torch.finfo(torch.float32).max)
    return keys, values, found[2]


def _tiles(caches: Sequence[Tensor], src: Tensor, bits: int) -> int:
    return cdiv(src.shape[1] * cold_capacity(caches[0], bits), format_of(caches[0], bits)["GROUP"])


def _run(
    kernel, caches: Sequence[Tensor], src: Tensor, bits: int, found: Tensor, *more: Tensor | None
) -> None:
    cache, moves, layers = caches[0], len(src), len(caches)
    layout = format_of(cache, bits)
    tiles = _tiles(caches, src, bits)
    kernel[moves * tiles * cache.shape[1], layers](
        pointers_to(caches),
        src,
        found,
        *more,
        src.shape[1],
        *(stride * cache.element_size() for stride in cache.stride()[:2]),
        **{name: layout[name] for name in ("BITS", "CAPACITY", "GROUP", "HEAD_SIZE", "HALF")},
        HEADS=cache.shape[1],
        KIND=kind_of(cache.dtype),
        num_warps=4,
    )


@triton.jit
def load_tile(
    pointers,
    src,
    sources,
    page_bytes,
    head_bytes,
    BITS: tl.constexpr,
    CAPACITY: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    KIND: tl.constexpr,
):
    """A program's 64 tokens of a move.

    Returns:
        Low and high keys, low and high values, and the tokens' places in the move.
    """
    head, tile, move, _ = place_of(sources, CAPACITY, GROUP, HEADS)
    token, channel = tile * GROUP + tl.arange(0, GROUP), tl.arange(0, HALF)[None, :]
    real = token < sources * CAPACITY
    mine = src + move * sources
    page = tl.load(mine + token // CAPACITY, mask=real, other=0)
    cache = tl.load(pointers + tl.program_id(1)).to(tl.pointer_type(tl.uint8))
    key_low, key_high, value_low, value_high = load_tokens(
        tl.multiple_of(cache, 16) + head.to(tl.int64) * head_bytes,
        page[:, None],
        (token % CAPACITY)[:, None],
        channel,
        real[:, None] & (channel < HEAD_SIZE // 2),
        page_bytes,
        BITS,
        CAPACITY,
        GROUP,
        HEAD_SIZE,
        KIND,
    )
    return key_low, key_high, value_low, value_high, token


@triton.jit
def place_of(sources, CAPACITY: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr):
    """Head, tile, move and tiles of a program of ``[moves * tiles * heads, layers]``."""
    program = tl.program_id(0)
    tiles = tl.cdiv(sources * CAPACITY, GROUP)
    return program % HEADS, program // HEADS % tiles, program // HEADS // tiles, tiles


@triton.jit
def row_of(move, head, tiles, HEADS: tl.constexpr):
    """The program's row in ``[layers, moves, heads]``."""
    moves = tl.num_programs(0) // (HEADS * tiles)
    return (tl.program_id(1) * moves + move).to(tl.int64) * HEADS + head


@triton.jit
def length_of(low, high):
    """Lengths of tokens, which are in two halves of channels."""
    return tl.sqrt_rn(tl.sum(low * low, 1) + tl.sum(high * high, 1))


@triton.jit
def sum_units(
    pointers,
    src,
    found,
    sources,
    page_bytes,
    head_bytes,
    BITS: tl.constexpr,
    CAPACITY: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    KIND: tl.constexpr,
):
    """Sums of 64 unit keys, to ``found`` ``[layers, moves, heads, tiles, head_size]``."""
    low, high, _, _, _ = load_tile(
        pointers,
        src,
        sources,
        page_bytes,
        head_bytes,
        BITS,
        CAPACITY,
        GROUP,
        HEAD_SIZE,
        HALF,
        HEADS,
        KIND,
    )
    inverse = (1 / clamped(length_of(low, high)))[:, None]
    head, tile, move, tiles = place_of(sources, CAPACITY, GROUP, HEADS)
    channel = tl.arange(0, HALF)
    mine = found + (row_of(move, head, tiles, HEADS) * tiles + tile) * HEAD_SIZE + channel
    present = channel < HEAD_SIZE // 2
    tl.store(mine, tl.sum(low * inverse, 0), mask=present)
    tl.store(mine + HEAD_SIZE // 2, tl.sum(high * inverse, 0), mask=present)


@triton.jit
def clamped(length):
    """What float32 can divide by and multiply with; NaN stays."""
    inside = tl.minimum(tl.maximum(length, 1e-12), 3.4028234663852886e38)
    return tl.where(length == length, inside, length)


@triton.jit
def measure(
    pointers,
    src,
    found,
    anchor,
    sources,
    page_bytes,
    head_bytes,
    BITS: tl.constexpr,
    CAPACITY: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    KIND: tl.constexpr,
):
    """Lengths and cosines of 64 tokens, to ``found`` ``[3, layers, moves, heads, tokens]``."""
    key_low, key_high, value_low, value_high, token = load_tile(
        pointers,
        src,
        sources,
        page_bytes,
        head_bytes,
        BITS,
        CAPACITY,
        GROUP,
        HEAD_SIZE,
        HALF,
        HEADS,
        KIND,
    )
    head, _, move, tiles = place_of(sources, CAPACITY, GROUP, HEADS)
    tokens, row = sources * CAPACITY, row_of(move, head, tiles, HEADS)
    rows = tl.num_programs(0) // tiles * tl.num_programs(1)
    mine, real = found + row * tokens + token, token < tokens
    side = rows.to(tl.int64) * tokens
    key_length = length_of(key_low, key_high)
    tl.store(mine, key_length, mask=real)
    tl.store(mine + side, length_of(value_low, value_high), mask=real)
    if anchor is not None:
        channel = tl.arange(0, HALF)
        present = channel < HEAD_SIZE // 2
        at = anchor + row * HEAD_SIZE + channel
        low = tl.load(at, mask=present, other=0)[None, :]
        high = tl.load(at + HEAD_SIZE // 2, mask=present, other=0)[None, :]
        product = tl.sum(key_low * low, 1) + tl.sum(key_high * high, 1)
        tl.store(mine + 2 * side, product / clamped(key_length), mask=real)
