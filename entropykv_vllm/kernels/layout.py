# SPDX-License-Identifier: Apache-2.0
"""How a hot page stores keys and values.

A layer's cache is ``[num_blocks, kv_heads, block_size, 2 * head_size]``. CPUs have it in *tiles*:
the bytes of one head of one page are a K region ``[page/16][head_size/p][16][p]`` followed by a V
region ``[head_size/16][page/p][16][p]``, with p = 4 bytes / bytes per element: what matrix units
take, and what vLLM calls "amx". GPUs have it in *rows*, as the shape says: of each token its key
and then its value, which vLLM's own kernels and FlashAttention read too. Pages and head sizes are
multiples of 16.
"""

from typing import Literal

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
TILE = 16

Order = Literal["tiles", "rows"]


def read_pages(cache: Tensor, pages: Tensor, order: Order = "tiles") -> tuple[Tensor, Tensor]:
    """Keys and values of some pages, tokens in order.

    Args:
        cache: float32, bfloat16 or float16 ``[num_blocks, heads, block_size, 2 * head_size]``.
        pages: int64 ``[...]`` block ids.
        order: of the bytes.

    Returns:
        Two copies ``[..., heads, block_size, head_size]`` in the cache's dtype (not contiguous).

    Raises:
        ValueError: another dtype, or pages or heads that are not whole tiles.
    """
    packed = cache.index_select(0, pages.flatten()).unflatten(0, pages.shape)
    keys, values = _views(packed, order)
    shape = *pages.shape, *_page_shape(cache)
    return keys.reshape(shape), values.reshape(shape)


def write_pages(
    cache: Tensor, pages: Tensor, keys: Tensor, values: Tensor, order: Order = "tiles"
) -> None:
    """Overwrite some pages with keys and values, tokens in order.

    Args:
        cache: as in `read_pages`.
        pages: int64 ``[...]`` block ids, all different.
        keys: ``[..., heads, block_size, head_size]``.
        values: the same.
        order: of the bytes.

    Raises:
        ValueError: as in `read_pages`.
    """
    packed = cache.new_empty(*pages.shape, *cache.shape[1:])
    key_view, value_view = _views(packed, order)
    key_view.copy_(keys.reshape(key_view.shape))
    value_view.copy_(values.reshape(value_view.shape))
    cache.index_copy_(0, pages.flatten(), packed.flatten(0, -4))


def write_tokens(
    cache: Tensor, slots: Tensor, keys: Tensor, values: Tensor, order: Order = "tiles"
) -> None:
    """Overwrite single tokens of pages.

    Args:
        cache: as in `read_pages`; the last two dimensions contiguous.
        slots: int64 ``[tokens]``, page * block_size + offset, all different; negative: skip.
        keys: float ``[tokens, heads, head_size]``, rounded to the cache's dtype.
        values: the same.
        order: of the bytes.

    Raises:
        ValueError: as in `read_pages`.
    """
    new = slots >= 0
    page, at = slots[new] // cache.shape[2], slots[new] % cache.shape[2]
    key_view, value_view = _views(cache, order)
    pack = key_view.shape[-1]
    # Indices around a slice put the tokens first: [tokens, heads, ...].
    key_view[page, :, at // TILE, at % TILE] = (
        keys[new].to(cache.dtype).unflatten(-1, key_view.shape[-2:])
    )
    value_view[page, :, at // pack, at % pack] = (
        values[new].to(cache.dtype).unflatten(-1, value_view.shape[-2:])
    )


def _page_shape(cache: Tensor) -> tuple[int, int, int]:
    """Heads, tokens and head size of a page."""
    heads, block_size, width = cache.shape[-3:]
    return heads, block_size, width // 2


def _views(packed: Tensor, order: Order) -> tuple[Tensor, Tensor]:
    """Views of pages ``[..., heads, block_size, 2 * head_size]``, tokens before channels.

    K is ``[..., heads, page/16, 16, dim/p, p]`` and V ``[..., heads, page/p, p, dim/16, 16]``.
    """
    if packed.dtype not in FLOATS:
        raise ValueError(
            f"KV caches of {packed.dtype} are not supported, only 16 and 32 bit floats."
        )
    _, block_size, head_size = _page_shape(packed)
    if block_size % TILE or head_size % TILE:
        raise ValueError(
            f"Pages of {block_size} tokens of {head_size} channels are not whole tiles of {TILE}."
        )
    pack = 4 // packed.element_size()
    if order == "rows":
        keys, values = packed.split(head_size, -1)
        keys = keys.unflatten(-1, (head_size // pack, pack)).unflatten(-3, (-1, TILE))
        values = values.unflatten(-1, (head_size // TILE, TILE)).unflatten(-3, (-1, pack))
        return keys, values
    # Not flatten: a copy, which nobody would see being written, is an error.
    regions = packed.view(*packed.shape[:-2], 2, block_size * head_size)
    keys, values = regions.select(-2, 0), regions.select(-2, 1)
    keys = keys.unflatten(-1, (block_size // TILE, head_size // pack, TILE, pack))
    values = values.unflatten(-1, (head_size // TILE, block_size // pack, TILE, pack))
    return keys.transpose(-3, -2), values.movedim((-4, -2), (-2, -1))
