# SPDX-License-Identifier: Apache-2.0
"""The online softmax of some query rows over cold and hot pages, tile by tile.

Heads are worked on in halves, channels ``[0, D/2)`` and ``[D/2, D)``: a byte of 4 bit codes holds
a channel of each, so that unpacking a tile of bytes gives two tiles of codes and moves nothing
across lanes. Hot pages follow suit, since the sums are shared. Halves are padded to a power of two.

A tile of a cold page is a group of 64 tokens, whose keys share their scales. What dequantizing
needs is folded into the other factor of each product, 16 or 64 rows in place of 64 tokens:

    q . (zero + scale * code) = q . zero + (q * scale) . code                   keys, per channel
    w . (zero + scale * code) = w . zero + (w * scale) . code                   values, per token

so the page's codes go to the matrix units as they are. Codes of 4 bits become 16 bit floats without
a conversion, by setting the bits of an exponent: BASE + code, where the distance of neighbours is
one unit of a high bit of the mantissa. What that adds to a product, BASE times the sum of the other
factor *as it was rounded*, is taken off again in float32. The middle of the codes, not 0, is what
the rounded factor is multiplied with: half the error, and a bias of keys meets none.
"""

import triton
import triton.language as tl

from entropykv_vllm.kernels.gpu.unpack import base_of, halves
from entropykv_vllm.plan.capacity import GROUP

#: Tokens of a tile: a group of a cold page (the last one may be shorter), or tokens in hot pages.
TILE = GROUP


@triton.jit
def load_codes(
    codes,
    token,
    channel,
    here,
    BITS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    KIND: tl.constexpr,
    DOT: tl.constexpr,
):
    """Codes (plus BASE) of the channels of each half, where they are ``here``.

    Tokens and channels are ``[n, 1]`` and ``[1, m]``, or the other way round: the product then
    needs no transposition, which would keep the compiler from loading ahead.
    """
    if BITS == 4:
        row = codes + token * (HEAD_SIZE // 2) + channel
        both = tl.load(row, mask=here, other=0)
        low, high = halves(both, KIND, DOT)
    else:
        row = codes.to(tl.pointer_type(tl.int8)) + token * HEAD_SIZE + channel
        low = tl.load(row, mask=here, other=0).to(DOT)
        high = tl.load(row + HEAD_SIZE // 2, mask=here, other=0).to(DOT)
    return low, high


@triton.jit
def fold(factor, scale, zero, BITS: tl.constexpr, KIND: tl.constexpr, DOT: tl.constexpr):
    """``factor * scale`` as a factor of codes, and what each column of the product must get added.

    Args:
        factor: float32 ``[n, rows]``.
        scale: float32 ``[n]``, and ``zero``.
    """
    CENTRE: tl.constexpr = 7.5 if BITS == 4 else 0.0
    exact = factor * scale[:, None]
    rounded = exact.to(DOT)
    added = factor * (zero + CENTRE * scale)[:, None]
    if BITS == 4:
        added -= (base_of(BITS, KIND) + CENTRE) * rounded.to(tl.float32)
    return rounded, tl.sum(added, 0)


@triton.jit
def weigh(products, unit, softcap, CAPPED: tl.constexpr):
    """Logits in base 2; ``unit``: the scale times log2(e), or the scale where they are capped."""
    logits = products * unit
    if CAPPED:
        # softcap * tanh(logits / softcap), from an exponential that may overflow.
        grown = tl.exp2(logits * (2.885390081777927 / softcap))
        logits = (softcap * 1.4426950408889634) * (1 - 2 / (grown + 1))
    return logits


@triton.jit
def soften(logits, top, total):
    """A step of the online softmax: new maximum and sum, weights, factor of what came before."""
    new = tl.maximum(top, tl.max(logits, 0))
    weights = tl.exp2(logits - new[None, :])
    factor = tl.exp2(top - new)
    return new, total * factor + tl.sum(weights, 0), weights, factor


@triton.jit
def over_cold(
    low,
    high,
    top,
    total,
    bias,
    sum_low,
    sum_high,
    head,
    table,
    first,
    last,
    page_bytes,
    unit,
    softcap,
    BITS: tl.constexpr,
    CAPACITY: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    CAPPED: tl.constexpr,
    KIND: tl.constexpr,
    DOT: tl.constexpr,
):
    """Add the tiles ``first`` to ``last`` of a request's cold pages, counted through its pages.

    One flat loop, so that the pipeline runs on from page to page. The id of a page is loaded for
    each of its tiles (at most every 4 kB): four bytes that the cache holds.

    Args:
        low: float32 ``[HALF, rows]``, the query's first half; ``high`` is the other.
        top: float32 ``[rows]``, the largest logit, ``total`` the sum of weights.
        bias: float32 ``[rows]``, what all channels get, by the zeros of values.
        sum_low: float32 ``[HALF, rows]``, sums of values, and ``sum_high``.
        head: uint8 pointer to the KV head in page 0.
        table: int32 pointer to the request's pages.
        page_bytes: int64, from page to page.
    """
    TILES: tl.constexpr = (CAPACITY + GROUP - 1) // GROUP
    CODES: tl.constexpr = CAPACITY * HEAD_SIZE * BITS // 8
    HALF_SIZE: tl.constexpr = HEAD_SIZE // 2
    ZERO: tl.constexpr = TILES * HEAD_SIZE
    channel, token = tl.arange(0, HALF), tl.arange(0, GROUP)
    present = channel < HALF_SIZE
    for tile in range(first, last):
        page = head + tl.load(table + tile // TILES).to(tl.int64) * page_bytes
        group = tile % TILES
        real = token < CAPACITY - group * GROUP
        at = group * GROUP + token

        scales = (page + 2 * CODES).to(tl.pointer_type(tl.float16))
        mine = scales + group * HEAD_SIZE + channel
        scale_low = tl.load(mine, mask=present, other=0).to(tl.float32)
        scale_high = tl.load(mine + HALF_SIZE, mask=present, other=0).to(tl.float32)
        zero_low = tl.load(mine + ZERO, mask=present, other=0).to(tl.float32)
        zero_high = tl.load(mine + ZERO + HALF_SIZE, mask=present, other=0).to(tl.float32)
        # These are too narrow to be loaded ahead, so they are asked for early.
        by_token = scales + 2 * ZERO + at
        scale = tl.load(by_token, mask=real, other=0).to(tl.float32)
        zero = tl.load(by_token + CAPACITY, mask=real, other=0).to(tl.float32)

        code_low, code_high = load_codes(
            page,
            at[:, None],
            channel[None, :],
            real[:, None] & present[None, :],
            BITS,
            HEAD_SIZE,
            KIND,
            DOT,
        )
        scaled_low, extra_low = fold(low, scale_low, zero_low, BITS, KIND, DOT)
        scaled_high, extra_high = fold(high, scale_high, zero_high, BITS, KIND, DOT)
        products = tl.dot(code_low, scaled_low, input_precision="ieee")
        products = tl.dot(code_high, scaled_high, products, input_precision="ieee")
        products += (extra_low + extra_high)[None, :]
        logits = tl.where(real[:, None], weigh(products, unit, softcap, CAPPED), float("-inf"))
        top, total, weights, factor = soften(logits, top, total)

        code_low, code_high = load_codes(
            page + CODES,
            at[None, :],
            channel[:, None],
            real[None, :] & present[:, None],
            BITS,
            HEAD_SIZE,
            KIND,
            DOT,
        )
        scaled, extra = fold(weights, scale, zero, BITS, KIND, DOT)
        bias = bias * factor + extra
        sum_low = tl.dot(code_low, scaled, sum_low * factor[None, :], input_precision="ieee")
        sum_high = tl.dot(code_high, scaled, sum_high * factor[None, :], input_precision="ieee")
    return top, total, bias, sum_low, sum_high


@triton.jit
def over_hot(
    low,
    high,
    top,
    total,
    bias,
    sum_low,
    sum_high,
    head,
    table,
    first,
    last,
    tokens,
    position,
    page_stride,
    unit,
    softcap,
    PAGE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    TILE: tl.constexpr,
    CAUSAL: tl.constexpr,
    CAPPED: tl.constexpr,
    DOT: tl.constexpr,
):
    """Add the tokens ``first`` to ``last`` in a request's hot pages, a TILE at a time.

    Pages may be shorter than a tile, so each token's row looks up its page; the ids come from the
    cache after the first.

    Args:
        head: pointer to the KV head in page 0, of the cache's type.
        table: int32 pointer to the request's hot pages.
        tokens: that the pages hold; what follows is not read.
        position: int ``[rows]``, the last token that a row sees, if CAUSAL.
        page_stride: int64, numbers from page to page.
        low: this and the rest as in `over_cold`.
    """
    HALF_SIZE: tl.constexpr = HEAD_SIZE // 2
    channel = tl.arange(0, HALF)
    present = channel < HALF_SIZE
    rows_low, rows_high = low.to(DOT), high.to(DOT)
    for start in range(first, last, TILE):
        token = start + tl.arange(0, TILE)
        real = token < tokens
        page = tl.load(table + token // PAGE, mask=real, other=0).to(tl.int64)
        row = head + page * page_stride + (token % PAGE) * (2 * HEAD_SIZE)
        here = real[:, None] & present[None, :]
        at = row[:, None] + channel[None, :]
        key_low = tl.load(at, mask=here, other=0).to(DOT)
        key_high = tl.load(at + HALF_SIZE, mask=here, other=0).to(DOT)
        products = tl.dot(key_low, rows_low, input_precision="ieee")
        products = tl.dot(key_high, rows_high, products, input_precision="ieee")
        seen = real[:, None]
        if CAUSAL:
            seen = seen & (token[:, None] <= position[None, :])
        logits = tl.where(seen, weigh(products, unit, softcap, CAPPED), float("-inf"))
        top, total, weights, factor = soften(logits, top, total)

        here = real[None, :] & present[:, None]
        at = row[None, :] + HEAD_SIZE + channel[:, None]
        value_low = tl.load(at, mask=here, other=0).to(DOT)
        value_high = tl.load(at + HALF_SIZE, mask=here, other=0).to(DOT)
        weights = weights.to(DOT)
        bias = bias * factor
        sum_low = tl.dot(value_low, weights, sum_low * factor[None, :], input_precision="ieee")
        sum_high = tl.dot(value_high, weights, sum_high * factor[None, :], input_precision="ieee")
    return top, total, bias, sum_low, sum_high


@triton.jit
def over_pages(
    low,
    high,
    head,
    ids,
    cold,
    first_tile,
    last_tile,
    first,
    last,
    tokens,
    position,
    page_stride,
    unit,
    softcap,
    BITS: tl.constexpr,
    PAGE: tl.constexpr,
    CAPACITY: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    CAUSAL: tl.constexpr,
    CAPPED: tl.constexpr,
    KIND: tl.constexpr,
    DOT: tl.constexpr,
):
    """The softmax of some query rows over a request's cold pages, if any are quantized, and hot.

    Args:
        head: pointer to the KV head in page 0, of the cache's type.
        ids: int32 pointer to the request's pages: ``cold`` quantized ones, then hot ones.
        first_tile: and ``last_tile``, of the quantized pages.
        first: and ``last``, of the hot tokens, of which there are ``tokens``.
        page_stride: numbers from page to page.
        low: this and the rest as in `over_cold` and `over_hot`.

    Returns:
        Float32 ``[rows]``: the largest logits, in base 2, and the sums of weights. ``[HALF, rows]``
        twice: the weighted sums of both halves of the values.
    """
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    bias = tl.zeros([ROWS], tl.float32)
    sum_low = tl.zeros([HALF, ROWS], tl.float32)
    sum_high = tl.zeros([HALF, ROWS], tl.float32)
    stride = page_stride.to(tl.int64)
    if BITS < 16:
        SIZE: tl.constexpr = KIND.primitive_bitwidth // 8
        top, total, bias, sum_low, sum_high = over_cold(
            low,
            high,
            top,
            total,
            bias,
            sum_low,
            sum_high,
            head.to(tl.pointer_type(tl.uint8)),
            ids,
            first_tile,
            last_tile,
            stride * SIZE,
            unit,
            softcap,
            BITS,
            CAPACITY,
            GROUP,
            HEAD_SIZE,
            HALF,
            CAPPED,
            KIND,
            DOT,
        )
        ids += cold
    top, total, bias, sum_low, sum_high = over_hot(
        low,
        high,
        top,
        total,
        bias,
        sum_low,
        sum_high,
        head,
        ids,
        first,
        last,
        tokens,
        position,
        stride,
        unit,
        softcap,
        PAGE,
        HEAD_SIZE,
        HALF,
        TILE,
        CAUSAL,
        CAPPED,
        DOT,
    )
    return top, total, sum_low + bias[None, :], sum_high + bias[None, :]
