# SPDX-License-Identifier: Apache-2.0
"""Pages in rows as FlashAttention takes them: hot ones, and cold ones of 16 bits.

With such pages alone, FlashAttention runs unchanged over the compacted table, `attention.split`'s,
with ``cold * page + hot`` tokens in each row: cold pages are full, and come before the hot ones, so
the causal mask at the end is right.
"""

from __future__ import annotations

from torch import Tensor


def flash_views(cache: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of a layer, ``[num_blocks, page, heads, head_size]`` each, nothing copied.

    vLLM's backend makes the same two views of its own cache. What its FlashAttention asks of them:
    the last dimension is contiguous (else the wrapper copies the whole cache, in each step), pages
    are a multiple of 16 tokens, and, where the hardware copies tiles by itself, other strides are
    multiples of 16 bytes (version 4 wants pages of its own size for heads of 256 and for fp8, as
    vLLM's backend tells). Ours are the page's ``stride(0)``, two heads' sizes and a head's bytes.

    Args:
        cache: ``[num_blocks, heads, page, 2 * head_size]``, pages in rows.

    Raises:
        ValueError: FlashAttention would refuse or copy them.
    """
    keys, values = cache.transpose(1, 2).split(cache.shape[3] // 2, -1)
    strides = [stride * cache.element_size() for stride in keys.stride()[:3]]
    if cache.stride(3) != 1 or cache.shape[2] % 16 or any(stride % 16 for stride in strides):
        raise ValueError(
            f"FlashAttention cannot read pages of {cache.shape[2]} tokens with strides of "
            f"{strides} bytes."
        )
    return keys, values
