# SPDX-License-Identifier: Apache-2.0
"""Cold pages: how quantized keys and values lie in the bytes of a page.

The bytes of one KV head of a cold page of 8 or 4 bits that holds T tokens of D channels:

=======  =====  =========================
part     bytes  shape
=======  =====  =========================
K codes  –      ``T * D * bits / 8`` bytes
V codes  –      the same
K scale  fp16   ``[ceil(T / 64)][D]``
K zero   fp16   the same
V scale  fp16   ``[T]``
V zero   fp16   the same
rest     –      unspecified (zeros here)
=======  =====  =========================

A value is ``zero + scale * code``. Keys share a scale and a zero per channel in groups of 64
tokens, since some channels of keys are large for all tokens; values share them per token.

On GPUs (order "rows") codes come token after token, for K and V alike: 8 bit codes as signed bytes,
4 bit codes with channel d in the low half of byte d and channel ``d + D / 2`` in the high one.

On CPUs (order "tiles") codes come in blocks of 16 columns by 8 rows, the rows in pairs, as a matrix
unit takes them. Columns are tokens for K and channels for V. The blocks of 16 columns lie one after
another, in the order of the rows. Inside a block of 4 bit codes, 32 little-endian words of 16 bit
(two for a column: the even rows, the odd rows) hold the codes of 4 rows each, the first in the
lowest bits. 8 bit codes are a magnitude and a sign bit, in the order
``[row // 4][column // 4][row // 2 % 2][column % 4][row % 2]``.
"""

import torch
from torch import Tensor

from entropykv_vllm.kernels.layout import Order, read_pages, write_pages
from entropykv_vllm.plan.capacity import GROUP, TILE, capacity, quantized_bytes

BITS = (16, 8, 4)
FP16_MAX = 65504.0


def read_cold(
    cache: Tensor, pages: Tensor, bits: int, order: Order = "tiles"
) -> tuple[Tensor, Tensor]:
    """Keys and values of cold pages, tokens in order.

    Args:
        cache: float32, bfloat16 or float16 ``[num_blocks, heads, page, 2 * head_size]``.
        pages: integers ``[...]``, block ids.
        bits: 16 (stored as a hot page), 8 or 4.
        order: of the bytes.

    Returns:
        Two copies ``[..., heads, capacity, head_size]``: of the cache's dtype for 16 bits, float32
        for 8 and 4.

    Raises:
        ValueError: unknown ``bits``, or the cache cannot hold such pages.
    """
    tokens = cold_capacity(cache, bits)
    if bits == 16:
        return read_pages(cache, pages, order)
    chosen = page_bytes(cache).index_select(0, pages.flatten()).unflatten(0, pages.shape)
    return unpack(chosen, bits, tokens, cache.shape[-1] // 2, order)


def write_cold(
    cache: Tensor,
    pages: Tensor,
    keys: Tensor,
    values: Tensor,
    bits: int,
    order: Order = "tiles",
) -> None:
    """Overwrite pages with cold ones.

    Args:
        cache: as in `read_cold`; the last two dimensions contiguous.
        pages: int64 ``[...]``, block ids, all different.
        keys: float ``[..., heads, capacity, head_size]``.
        values: the same.
        bits: as in `read_cold`.
        order: of the bytes.

    Raises:
        ValueError: as in `read_cold`, or the pages would not be full.
    """
    tokens = cold_capacity(cache, bits)
    if keys.shape[-2] != tokens:
        raise ValueError(f"A cold page of {bits} bits holds {tokens} tokens, not {keys.shape[-2]}.")
    if bits == 16:
        return write_pages(cache, pages, keys, values, order)
    all_bytes = page_bytes(cache)
    packed = pack(keys, values, bits, all_bytes.shape[-1], order)
    all_bytes.index_copy_(0, pages.flatten(), packed.flatten(0, -3))


def cold_capacity(cache: Tensor, bits: int) -> int:
    """Tokens in a cold page of this cache.

    Raises:
        ValueError: unknown ``bits``, or not one tile fits.
    """
    if bits not in BITS:
        raise ValueError(f"bits must be 16, 8 or 4, not {bits}.")
    page, width = cache.shape[-2:]
    tokens = capacity(width // 2, page, cache.element_size(), bits)
    if not tokens:
        raise ValueError(f"Pages of {page} tokens are too short for cold pages of {bits} bits.")
    return tokens


def page_bytes(cache: Tensor) -> Tensor:
    """The cache's bytes: a view, uint8 ``[num_blocks, heads, head_bytes]``."""
    raw = cache.view(torch.uint8)
    return raw.view(*raw.shape[:-2], raw.shape[-2] * raw.shape[-1])


def pack(
    keys: Tensor, values: Tensor, bits: int, head_bytes: int, order: Order = "tiles"
) -> Tensor:
    """Quantize the tokens of heads into the bytes of cold pages.

    Args:
        keys: float ``[..., tokens, head_size]``, both multiples of 16.
        values: the same.
        bits: 8 or 4.
        head_bytes: bytes of one head of a page.
        order: of the codes.

    Returns:
        uint8 ``[..., head_bytes]``.

    Raises:
        ValueError: the tokens do not fit.
    """
    tokens, head_size = keys.shape[-2:]
    used = quantized_bytes(tokens, head_size, bits)
    if tokens % TILE or head_size % TILE or used > head_bytes:
        raise ValueError(
            f"{tokens} tokens of {head_size} channels in {bits} bits do not fit {head_bytes} bytes."
        )
    by_group = [quantize(group, bits, -2) for group in keys.split(GROUP, -2)]
    key_codes, key_scale, key_zero = (torch.cat(x, -2) for x in zip(*by_group, strict=True))
    value_codes, value_scale, value_zero = quantize(values, bits, -1)
    if order == "rows":
        parts = [_to_rows(key_codes, bits), _to_rows(value_codes, bits)]
    else:
        parts = [_to_blocks(key_codes, bits), _to_blocks(value_codes.mT, bits)]
    for floats in (key_scale, key_zero, value_scale, value_zero):
        parts.append(floats.flatten(-2).contiguous().view(torch.uint8))
    parts.append(keys.new_zeros(*keys.shape[:-2], head_bytes - used, dtype=torch.uint8))
    return torch.cat(parts, -1)


def unpack(
    packed: Tensor, bits: int, tokens: int, head_size: int, order: Order = "tiles"
) -> tuple[Tensor, Tensor]:
    """The keys and values that `pack` stored, up to their quantization.

    Args:
        packed: uint8 ``[..., head_bytes]``.
        bits: 8 or 4.
        tokens: tokens of a page.
        head_size: channels of a head.
        order: of the codes.

    Returns:
        Two float32 tensors ``[..., tokens, head_size]``.
    """
    codes = tokens * head_size * bits // 8
    per_group = 2 * -(-tokens // GROUP) * head_size
    sizes = [codes, codes, per_group, per_group, 2 * tokens, 2 * tokens]
    k, v, *floats = packed[..., : sum(sizes)].split(sizes, -1)
    k_scale, k_zero, v_scale, v_zero = (x.contiguous().view(torch.float16) for x in floats)
    if order == "rows":
        key_codes, value_codes = (_from_rows(x, head_size, bits) for x in (k, v))
    else:
        key_codes = _from_blocks(k, tokens, head_size, bits)
        value_codes = _from_blocks(v, head_size, tokens, bits).mT
    by_token = (x.unflatten(-1, (-1, head_size)) for x in (k_scale, k_zero))
    by_token = (x.repeat_interleave(GROUP, -2)[..., :tokens, :] for x in by_token)
    return (
        dequantize(key_codes, *by_token),
        dequantize(value_codes, v_scale[..., None], v_zero[..., None]),
    )


def quantize(x: Tensor, bits: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, and the scale and zero of each group.

    Scales are rounded up, so that the ends of a group are within half a step of their codes. NaN
    counts as 0, and what fp16 cannot hold as the nearest number that it can.

    Args:
        x: float, any shape.
        bits: 8 (codes -127 to 127 around the middle) or 4 (codes 0 to 15 above the lowest).
        dim: the dimension that is a group.

    Returns:
        int8 codes of x's shape; fp16 scale and zero with size 1 in ``dim``.
    """
    x = x.to(torch.float32).nan_to_num(0.0).clamp(-FP16_MAX, FP16_MAX)
    low, high = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
    if bits == 4:
        zero = round_down(low)
        first, last, reach = 0, 15, high - zero.float()
    else:
        zero = ((low + high) / 2).to(torch.float16)
        first, last, reach = -127, 127, torch.maximum(high - zero.float(), zero.float() - low)
    scale = round_up(reach / last)
    steps = ((x - zero.float()) / scale.float()).round().clamp(first, last)
    return steps.where(scale > 0, 0.0).to(torch.int8), scale, zero


def dequantize(codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """``zero + scale * code`` in float32; the product is exact, so only the sum is rounded."""
    return zero.float() + scale.float() * codes.float()


def round_down(x: Tensor) -> Tensor:
    """The largest fp16 number that is not above float32 ``x`` within fp16's range."""
    near = x.to(torch.float16)
    bits = near.view(torch.int16)
    # The next lower number: a smaller magnitude above zero, a larger one below.
    lower = bits + torch.where(bits < 0, 1, -1).to(torch.int16)
    return torch.where(near.float() > x, lower, bits).view(torch.float16)


def round_up(x: Tensor) -> Tensor:
    """The smallest fp16 number that is not below float32 ``x`` within fp16's range."""
    return -round_down(-x)


def _to_rows(codes: Tensor, bits: int) -> Tensor:
    """int8 ``[..., tokens, head_size]`` to uint8 ``[..., tokens * head_size * bits / 8]``."""
    stored = codes.contiguous().view(torch.uint8)
    if bits == 4:
        low, high = stored.chunk(2, -1)
        stored = low | high << 4
    return stored.flatten(-2)


def _from_rows(packed: Tensor, head_size: int, bits: int) -> Tensor:
    """The inverse of `_to_rows`."""
    rows = packed.unflatten(-1, (-1, head_size * bits // 8)).contiguous()
    if bits == 4:
        return torch.cat([rows & 15, rows >> 4], -1).view(torch.int8)
    return rows.view(torch.int8)


def _to_blocks(codes: Tensor, bits: int) -> Tensor:
    """int8 ``[..., columns, rows]`` to uint8 ``[..., columns * rows * bits / 8]``."""
    if bits == 4:
        low, high = _blocks(codes.to(torch.uint8), 4).unbind(-1)
        return (low | high << 4).flatten(-6)
    stored = codes.abs().to(torch.uint8) | (codes < 0).to(torch.uint8) << 7
    return _blocks(stored, 8).flatten(-7)


def _from_blocks(packed: Tensor, columns: int, rows: int, bits: int) -> Tensor:
    """The inverse of `_to_blocks`."""
    stored = packed.new_empty(*packed.shape[:-1], columns, rows)
    if bits == 4:
        packed = torch.stack([packed & 15, packed >> 4], -1)
    blocks = _blocks(stored, bits)
    blocks.copy_(packed.reshape(blocks.shape))
    magnitude = (stored & 127).to(torch.int8)
    return torch.where(stored > 127, -magnitude, magnitude)


def _blocks(codes: Tensor, bits: int) -> Tensor:
    """A view of ``[..., columns, rows]`` with seven dimensions in the order of the bytes."""
    tiles = codes.unflatten(-1, (-1, 2, 2, 2)).unflatten(-5, (-1, 4, 4))
    # Of a block: column // 4, column % 4, row // 4, row // 2 % 2, row % 2.
    columns, c1, c0, rows, r2, r1, r0 = range(-7, 0)
    order = [c1, c0, r0, r2, r1] if bits == 4 else [r2, c1, r1, c0, r0]
    return tiles.movedim([columns, rows, *order], list(range(-7, 0)))
