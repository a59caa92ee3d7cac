# SPDX-License-Identifier: Apache-2.0
"""How a hot page stores keys and values.

A layer's cache is ``[num_blocks, kv_heads, block_size, 2 * head_size]``, but the bytes of one head
of one page are a K region followed by a V region, each packed as the attention kernel of an "isa"
(ours, or vLLM's ``_get_attn_isa``) wants it:

=========  ================================  ==================================
isa        K region                          V region
=========  ================================  ==================================
entropykv  ``[page/16][head_size/p][16][p]`` ``[head_size/16][page/p][16][p]``
amx        the same                          the same
vec        ``[head_size][page]``             ``[page][head_size]``
vec16      the same                          the same
=========  ================================  ==================================

with p = 4 bytes / bytes per element. "entropykv" takes any page and head size that 16 divides. The
others are vLLM's: its amx needs pages of whole 32 tokens, and for head sizes that 32 does not
divide it takes vec16 whatever the isa.
"""

from collections.abc import Callable

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
TILE = 16


def read_pages(cache: Tensor, pages: Tensor, isa: str = "entropykv") -> tuple[Tensor, Tensor]:
    """Keys and values of some pages, tokens in order.

    Args:
        cache: float32, bfloat16 or float16 ``[num_blocks, heads, block_size, 2 * head_size]``.
        pages: int64 ``[...]`` block ids.
        isa: "entropykv", "amx", "vec" or "vec16".

    Returns:
        Two copies ``[..., heads, block_size, head_size]`` in the cache's dtype (not contiguous).

    Raises:
        ValueError: an unknown isa, dtype, or a page size that the isa cannot hold.
    """
    packed = cache.index_select(0, pages.flatten()).unflatten(0, pages.shape)
    keys, values = _views(packed, isa)
    shape = *pages.shape, *_page_shape(cache)
    return keys.reshape(shape), values.reshape(shape)


def write_pages(
    cache: Tensor, pages: Tensor, keys: Tensor, values: Tensor, isa: str = "entropykv"
) -> None:
    """Overwrite some pages with keys and values, tokens in order.

    Args:
        cache: as in `read_pages`.
        pages: int64 ``[...]`` block ids, all different.
        keys: ``[..., heads, block_size, head_size]``.
        values: the same.
        isa: "entropykv", "amx", "vec" or "vec16".

    Raises:
        ValueError: as in `read_pages`.
    """
    packed = cache.new_empty(*pages.shape, *cache.shape[1:])
    key_view, value_view = _views(packed, isa)
    key_view.copy_(keys.reshape(key_view.shape))
    value_view.copy_(values.reshape(value_view.shape))
    cache.index_copy_(0, pages.flatten(), packed.flatten(0, -4))


def write_tokens(cache: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> None:
    """Overwrite single tokens of pages in the layout "entropykv".

    Args:
        cache: as in `read_pages`; the last two dimensions contiguous.
        slots: int64 ``[tokens]``, page * block_size + offset, all different; negative: skip.
        keys: float ``[tokens, heads, head_size]``, rounded to the cache's dtype.
        values: the same.

    Raises:
        ValueError: as in `read_pages`.
    """
    new = slots >= 0
    page, at = slots[new] // cache.shape[2], slots[new] % cache.shape[2]
    key_view, value_view = _views(cache, "entropykv")
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


def _views(packed: Tensor, isa: str) -> tuple[Tensor, Tensor]:
    """Views of pages ``[..., heads, block_size, 2 * head_size]`` with tokens before channels."""
    if isa not in _LAYOUTS:
        raise ValueError(f"The page layout {isa!r} is not one of {', '.join(_LAYOUTS)}.")
    if packed.dtype not in FLOATS:
        raise ValueError(
            f"KV caches of {packed.dtype} are not supported, only 16 and 32 bit floats."
        )
    _, block_size, head_size = _page_shape(packed)
    # Not flatten: a copy, which nobody would see being written, is an error.
    regions = packed.view(*packed.shape[:-2], 2, block_size * head_size)
    layout = _LAYOUTS["vec16" if head_size % 32 and isa != "entropykv" else isa]
    return layout(regions.select(-2, 0), regions.select(-2, 1), block_size, head_size)


def _vec(keys: Tensor, values: Tensor, block_size: int, head_size: int) -> tuple[Tensor, Tensor]:
    """Both ``[..., heads, block_size, head_size]``."""
    return (
        keys.unflatten(-1, (head_size, block_size)).transpose(-1, -2),
        values.unflatten(-1, (block_size, head_size)),
    )


def _tiles(keys: Tensor, values: Tensor, block_size: int, head_size: int) -> tuple[Tensor, Tensor]:
    """``[..., heads, page/16, 16, dim/p, p]`` and ``[..., heads, page/p, p, dim/16, 16]``."""
    if block_size % TILE or head_size % TILE:
        raise ValueError(
            f"Pages of {block_size} tokens of {head_size} channels are not whole tiles of {TILE}."
        )
    pack = 4 // keys.element_size()
    keys = keys.unflatten(-1, (block_size // TILE, head_size // pack, TILE, pack))
    values = values.unflatten(-1, (head_size // TILE, block_size // pack, TILE, pack))
    return keys.transpose(-3, -2), values.movedim((-4, -2), (-2, -1))


def _amx(keys: Tensor, values: Tensor, block_size: int, head_size: int) -> tuple[Tensor, Tensor]:
    """As `_tiles`."""
    if block_size % 32:
        raise ValueError(f"Pages of {block_size} tokens do not fit isa 'amx', which needs 32.")
    return _tiles(keys, values, block_size, head_size)


_LAYOUTS: dict[str, Callable[[Tensor, Tensor, int, int], tuple[Tensor, Tensor]]] = {
    "entropykv": _tiles,
    "amx": _amx,
    "vec": _vec,
    "vec16": _vec,
}
