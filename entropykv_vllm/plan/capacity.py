# SPDX-License-Identifier: Apache-2.0
"""How many tokens fit into a cold page; `csrc/page_format.h` says the same to the kernels."""

from __future__ import annotations

import math

#: Tokens whose keys share a scale and a zero per channel.
GROUP = 64

#: Keys are stored in tiles of this many tokens.
TILE = 16

#: Cold pages are always full, so a segment is a whole number of hot pages and of cold pages. A page
#: holds a few tokens less than it could where that keeps the shortest segment within this length.
LONGEST_UNIT = 1024

#: The most channels of a head that the kernels take.
WIDEST_HEAD = 256


def check_head(head_size: int) -> None:
    """Refuse heads that the kernels do not take.

    Raises:
        ValueError: one sentence that says which they take.
    """
    if head_size < TILE or head_size % TILE or head_size > WIDEST_HEAD:
        raise ValueError(
            f"heads of {head_size} channels are not supported: they must be a multiple of {TILE}, "
            f"up to {WIDEST_HEAD}"
        )


def head_bytes(head_size: int, page: int, item_bytes: int) -> int:
    """Bytes of one KV head of a page of `page` tokens in the cache's dtype, keys and values."""
    return 2 * head_size * page * item_bytes


def quantized_bytes(tokens: int, head_size: int, bits: int) -> int:
    """Bytes of one KV head of `tokens` quantized tokens, scales and zeros (16 bit) included."""
    codes = 2 * tokens * head_size * bits // 8
    groups = -(-tokens // GROUP)
    return codes + 4 * groups * head_size + 4 * tokens


def capacity(head_size: int, page: int, item_bytes: int, bits: int) -> int:
    """Tokens in a cold page, which has as many bytes as a hot one; 0 if not one tile fits.

    Args:
        head_size: channels of a KV head.
        page: tokens of a hot page.
        item_bytes: bytes of an element of the cache, 2 or 4.
        bits: 16 for cold pages that are stored as hot ones, or 8 or 4.
    """
    if bits == 16:
        return page
    room = head_bytes(head_size, page, item_bytes)
    longest = max(LONGEST_UNIT, page)
    tokens = 8 * room // (2 * head_size * bits) // TILE * TILE
    while tokens and (
        quantized_bytes(tokens, head_size, bits) > room or math.lcm(page, tokens) > longest
    ):
        tokens -= TILE
    return tokens
