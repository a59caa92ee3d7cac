# SPDX-License-Identifier: Apache-2.0
"""How a page of vLLM's CPU cache stores keys and values.

A layer's cache is ``[num_blocks, kv_heads, block_size, 2 * head_size]``, but the bytes of one head
of one page are a K region followed by a V region, each packed as the attention kernel of an "isa"
(vLLM's ``_get_attn_isa``) wants it:

======  ================================  ==================================
isa     K region                          V region
======  ================================  ==================================
vec     ``[head_size][page]``             ``[page][head_size]``
vec16   the same                          the same
amx     ``[page/16][head_size/p][16][p]`` ``[head_size/16][page/p][16][p]``
======  ================================  ==================================

with p = 4 bytes / bytes per element. For head sizes that 32 does not divide, vLLM takes vec16
whatever the isa.
"""

from collections.abc import Callable

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def read_pages(cache: Tensor, pages: Tensor, isa: str) -> tuple[Tensor, Tensor]:
    """Keys and values of some pages, tokens in order.

    Args:
        cache: float32, bfloat16 or float16 ``[num_blocks, heads, block_size, 2 * head_size]``.
        pages: int64 ``[...]`` block ids.
        isa: "vec", "vec16" or "amx".

    Returns:
        Two copies ``[..., heads, block_size, head_size]`` in the cache's dtype (not contiguous).

    Raises:
        ValueError: an unknown isa, dtype, or a page size that the isa cannot hold.
    """
    packed = cache.index_select(0, pages.flatten()).unflatten(0, pages.shape)
    keys, values = _views(packed, isa)
    shape = *pages.shape, *_page_shape(cache)
    return keys.reshape(shape), values.reshape(shape)


def write_pages(cache: Tensor, pages: Tensor, keys: Tensor, values: Tensor, isa: str) -> None:
    """Overwrite some pages with keys and values, tokens in order.

    Args:
        cache: as in `read_pages`.
        pages: int64 ``[...]`` block ids, all different.
        keys: ``[..., heads, block_size, head_size]``.
        values: the same.
        isa: "vec", "vec16" or "amx".

    Raises:
        ValueError: as in `read_pages`.
    """
    packed = cache.new_empty(*pages.shape, *cache.shape[1:])
    key_view, value_view = _views(packed, isa)
    key_view.copy_(keys.reshape(key_view.shape))
    value_view.copy_(values.reshape(value_view.shape))
    cache.index_copy_(0, pages.flatten(), packed.flatten(0, -4))


def _page_shape(cache: Tensor) -> tuple[int, int, int]:
    """Heads, tokens and head size of a page."""
    heads, block_size, width = cache.shape[-3:]
    return heads, block_size, width // 2


def _views(packed: Tensor, isa: str) -> tuple[Tensor, Tensor]:
    """Views of pages ``[..., heads, block_size, 2 * head_size]`` with tokens before channels."""
    if isa not in _LAYOUTS:
        raise ValueError(f"vLLM's CPU attention isa {isa!r} is not one of {', '.join(_LAYOUTS)}.")
    if packed.dtype not in FLOATS:
        raise ValueError(
            f"KV caches of {packed.dtype} are not supported, only 16 and 32 bit floats."
        )
    _, block_size, head_size = _page_shape(packed)
    regions = packed.flatten(-2).unflatten(-1, (2, -1))
    layout = _LAYOUTS["vec16" if head_size % 32 else isa]
    return layout(regions.select(-2, 0), regions.select(-2, 1), block_size, head_size)


def _vec(keys: Tensor, values: Tensor, block_size: int, head_size: int) -> tuple[Tensor, Tensor]:
    """Both ``[..., heads, block_size, head_size]``."""
    return (
        keys.unflatten(-1, (head_size, block_size)).transpose(-1, -2),
        values.unflatten(-1, (block_size, head_size)),
    )


def _amx(keys: Tensor, values: Tensor, block_size: int, head_size: int) -> tuple[Tensor, Tensor]:
    """``[..., heads, page/16, 16, dim/p, p]`` and ``[..., heads, page/p, p, dim/16, 16]``."""
    if block_size % 32:
        raise ValueError(f"Pages of {block_size} tokens do not fit isa 'amx', which needs 32.")
    pack = 4 // keys.element_size()
    keys = keys.unflatten(-1, (block_size // 16, head_size // pack, 16, pack))
    values = values.unflatten(-1, (head_size // 16, block_size // pack, 16, pack))
    return keys.transpose(-3, -2), values.movedim((-4, -2), (-2, -1))


_LAYOUTS: dict[str, Callable[[Tensor, Tensor, int, int], tuple[Tensor, Tensor]]] = {
    "vec": _vec,
    "vec16": _vec,
    "amx": _amx,
}
