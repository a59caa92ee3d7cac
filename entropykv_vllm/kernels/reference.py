# SPDX-License-Identifier: Apache-2.0
"""The ops on pages in plain torch: what native kernels are held to, and what runs without them.

`torch.ops.entropykv` has the same ops with the same arguments. Hot pages have the layout of
`entropykv_vllm.kernels.layout`, cold ones the format of `entropykv_vllm.kernels.formats`. A cache
is float32, bfloat16 or float16 ``[num_blocks, heads, page, 2 * head_size]``, and the bytes of a
page's head are contiguous.
"""

from itertools import pairwise

import torch
from torch import Tensor

from entropykv_vllm.kernels.formats import cold_capacity, page_bytes, read_cold, write_cold
from entropykv_vllm.kernels.layout import read_pages, write_tokens
from entropykv_vllm.kernels.scores import SCORES, Score
from entropykv_vllm.kernels.select import select

# Logits that are held at once.
LOGITS = 1 << 24


def write(key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Store new tokens in hot pages.

    Args:
        key: float ``[tokens, heads, head_size]``.
        value: the same.
        cache: written in place.
        slots: int64 ``[tokens]``, page * page length + offset; negative: skip the token.

    Raises:
        ValueError: a cache of another dtype, or one that 16 does not divide.
    """
    write_tokens(cache, slots, key, value)


def attention(
    query: Tensor,
    cache: Tensor,
    output: Tensor,
    starts: Tensor,
    table: Tensor,
    cold: Tensor,
    hot: Tensor,
    bits: int,
    scale: float,
    softcap: float,
    sinks: Tensor | None,
) -> None:
    """Attention of each request's new tokens to its cold tokens and, causally, its hot ones.

    Args:
        query: float ``[tokens, query_heads, head_size]``.
        cache: holds the new tokens already.
        output: float, query's shape, written in place.
        starts: int32 ``[requests + 1]``, the first row of each request in ``query``.
        table: int32 ``[requests, width]``: in each row the cold pages, then the hot ones; what
            follows is not read.
        cold: int32 ``[requests]``, cold pages.
        hot: int32 ``[requests]``, tokens in hot pages; the new ones are the last.
        bits: 16, 8 or 4, of the cold pages.
        scale: factor of the logits.
        softcap: ``c`` in ``c * tanh(logit / c)``; 0 for none.
        sinks: float32 ``[query_heads]`` or None, a logit that only adds to the denominator.

    Raises:
        ValueError: unknown ``bits``, or query heads that the heads do not divide.
    """
    heads, query_heads = cache.shape[1], query.shape[1]
    if query_heads % heads:
        raise ValueError(f"{query_heads} query heads cannot share {heads} KV heads.")
    for request, (start, end) in enumerate(pairwise(starts.tolist())):
        if start == end:
            continue
        row = table[request].long()
        keys, values = _tokens(cache, row, int(cold[request]), int(hot[request]), bits)
        rows = max(1, LOGITS // (query_heads * keys.shape[1]))
        for first in range(start, end, rows):
            part = slice(first, min(first + rows, end))
            visible = keys.shape[1] - end + 1 + torch.arange(first, part.stop, device=query.device)
            output[part] = _attend(query[part], keys, values, visible, scale, softcap, sinks)


def collapse(
    cache: Tensor,
    src: Tensor,
    dst: Tensor,
    sinks: Tensor,
    policy: str,
    granularity: str,
    scope: str,
    from_bits: int,
    bits: int,
) -> None:
    """Move by move, write the best tokens of some pages to cold ones, in order of position.

    Each move reads all its pages before it writes any.

    Args:
        cache: one layer's, written in place.
        src: int64 ``[moves, s]``, hot or cold pages, oldest first.
        dst: int64 ``[moves, m]``, all different within a move; they get full.
        sinks: integers ``[moves]``, leading tokens that must stay.
        policy: a name in `entropykv_vllm.kernels.scores.SCORES`.
        granularity: "token" or "block", see `entropykv_vllm.kernels.select.select`.
        scope: "head" or "layer", see there.
        from_bits: 16 for hot pages as ``src``; of cold ones, their bits.
        bits: 16, 8 or 4, of the pages that are written.

    Raises:
        ValueError: an unknown option, or the sources hold fewer tokens than must be written.
    """
    score = _score(policy)
    keep = dst.shape[1] * cold_capacity(cache, bits)
    for pages, to, protect in zip(src.long(), dst.long(), sinks, strict=True):
        keys, values = _by_head(*read_cold(cache, pages, from_bits))
        scores = score(keys, values)
        best = select(scores, keep, protect=protect, granularity=granularity, scope=scope)
        keys, values = (
            _by_page(torch.take_along_dim(x, best[..., None], 1), to) for x in (keys, values)
        )
        write_cold(cache, to, keys, values, bits)


def drop(cache: Tensor, src: Tensor, dst: Tensor, sinks: Tensor, policy: str, bits: int) -> None:
    """Move by move, copy the best of some cold pages, head by head, byte for byte and in order.

    A page is as good as the mean score of its tokens, where all pages of a move are one segment.
    Each move reads all its pages before it writes any.

    Args:
        cache: one layer's, written in place.
        src: int64 ``[moves, s]``, cold pages, oldest first.
        dst: int64 ``[moves, m]``, 1 <= m <= s, all different within a move.
        sinks: integers ``[moves]``, leading tokens whose pages must stay.
        policy: a name in `entropykv_vllm.kernels.scores.SCORES`.
        bits: 16, 8 or 4, of the pages.

    Raises:
        ValueError: unknown ``bits`` or ``policy``, or more pages to write than to read.
    """
    score = _score(policy)
    raw, tokens = page_bytes(cache), cold_capacity(cache, bits)
    for pages, to, protect in zip(src.long(), dst.long(), sinks, strict=True):
        scores = score(*_by_head(*read_cold(cache, pages, bits)))
        means = scores.unflatten(-1, (len(pages), tokens)).contiguous().mean(-1)
        best = select(means, len(to), protect=(protect + tokens - 1) // tokens)
        kept = torch.take_along_dim(raw[pages].transpose(0, 1), best[..., None], 1)
        raw.index_copy_(0, to, kept.transpose(0, 1))


def _score(policy: str) -> Score:
    if policy not in SCORES:
        raise ValueError(f"The policy {policy!r} is not one of {', '.join(SCORES)}.")
    return SCORES[policy]


def _by_head(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Two ``[pages, heads, tokens, dim]`` to ``[heads, pages * tokens, dim]``."""
    return keys.transpose(0, 1).flatten(1, 2), values.transpose(0, 1).flatten(1, 2)


def _by_page(tokens: Tensor, pages: Tensor) -> Tensor:
    """``[heads, pages * tokens, dim]`` to ``[pages, heads, tokens, dim]``."""
    return tokens.unflatten(1, (len(pages), -1)).transpose(0, 1)


def _tokens(cache: Tensor, row: Tensor, cold: int, hot: int, bits: int) -> list[Tensor]:
    """Keys and values of a request, float32 ``[heads, tokens, head_size]``."""
    pages = -(-hot // cache.shape[2])
    old = _by_head(*read_cold(cache, row[:cold], bits))
    new = _by_head(*read_pages(cache, row[cold : cold + pages]))
    # Cut, not masked: 0 * NaN from what no token has been written to would be NaN.
    return [torch.cat([a.float(), b[:, :hot].float()], 1) for a, b in zip(old, new, strict=True)]


def _attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor,
    scale: float,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    """Queries ``[q, query_heads, dim]`` of a request, each to its first ``visible`` tokens."""
    heads, tokens = keys.shape[:2]
    groups = query.float().transpose(0, 1).unflatten(0, (heads, -1))
    logits = groups @ keys[:, None].mT * scale
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    hidden = torch.arange(tokens, device=visible.device) >= visible[:, None]
    logits = logits.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        extra = sinks.float().view(heads, -1, 1, 1).expand(*logits.shape[:-1], 1)
        logits = torch.cat([logits, extra], -1)
    mixed = logits.softmax(-1)[..., :tokens] @ values[:, None]
    return mixed.flatten(0, 1).transpose(0, 1)
