# SPDX-License-Identifier: Apache-2.0
"""The ops on pages in plain torch: what native kernels are held to, and what runs without them.

`torch.ops.entropykv` has the same ops with the same arguments. Hot pages have the layout of
`entropykv_vllm.kernels.layout`, cold ones the format of `entropykv_vllm.kernels.formats`. A cache
is float32, bfloat16 or float16 ``[num_blocks, heads, page, 2 * head_size]``, and the bytes of a
page's head are contiguous. Here, and here alone, the order of those bytes is an argument.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise

import torch
from torch import Tensor

from entropykv_vllm.kernels.formats import cold_capacity, page_bytes, read_cold, write_cold
from entropykv_vllm.kernels.layout import Order, read_pages, write_tokens
from entropykv_vllm.kernels.scores import SCORES
from entropykv_vllm.kernels.select import select

# Logits that are held at once.
LOGITS = 1 << 24


def write(key: Tensor, value: Tensor, cache: Tensor, slots: Tensor, order: Order = "tiles") -> None:
    """Store new tokens in hot pages.

    Args:
        key: float ``[tokens, heads, head_size]``.
        value: the same.
        cache: written in place.
        slots: int64 ``[tokens]``, page * page length + offset; negative: skip the token.
        order: of the pages' bytes.

    Raises:
        ValueError: a cache of another dtype, or one that 16 does not divide.
    """
    write_tokens(cache, slots, key, value, order)


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
    order: Order = "tiles",
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
        order: of the pages' bytes.

    Raises:
        ValueError: unknown ``bits``, or query heads that the heads do not divide.
    """
    _check_query_heads(query, cache)
    for request, (start, end) in enumerate(pairwise(starts.tolist())):
        if start == end:
            continue
        row = table[request].long()
        held = int(cold[request]), int(hot[request])
        keys, values = _tokens(cache, row, *held, bits, order)
        for part, weights in _weights(query, keys, start, end, scale, softcap, sinks):
            mixed = weights @ values[:, None]
            output[part] = mixed.flatten(0, 1).transpose(0, 1)


def observe(
    query: Tensor,
    cache: Tensor,
    mass: Tensor,
    starts: Tensor,
    table: Tensor,
    cold: Tensor,
    hot: Tensor,
    bits: int,
    scale: float,
    softcap: float,
    sinks: Tensor | None,
    first: Tensor,
    fresh: Tensor,
    order: Order = "tiles",
) -> None:
    """Add the attention that each token gets to a table with a number per slot of a page.

    What a query gives a token is its weight in `attention`'s softmax, averaged over the query heads
    that share a KV head. The sum over all queries is the score of H2O (arXiv 2306.14048), over
    those at the end of a prompt that of SnapKV (2404.14469), over the last one that of TOVA
    (2401.06104).

    Args:
        query: as in `attention`, and so are all arguments that are not described here.
        cache: holds the new tokens already.
        mass: float32 ``[num_blocks, heads, slots]``, written in place. Of a hot page the first
            ``page`` slots are in use, of a cold one as many as it holds tokens; no other slot is
            read or written.
        starts: int32 ``[requests + 1]``.
        table: int32 ``[requests, width]``. Requests that share a page all add to it.
        cold: int32 ``[requests]``.
        hot: int32 ``[requests]``.
        bits: 16, 8 or 4.
        scale: factor of the logits.
        softcap: 0 for none.
        sinks: float32 ``[query_heads]`` or None.
        first: int32 ``[requests]``, the first row of each request that counts, 0 for all; from
            its number of rows on, none does.
        fresh: int32 ``[requests]``; where it is not 0, the slots in use of the request's pages are
            set to 0 before any request adds to them, even if none of its rows counts.
        order: of the pages' bytes.

    Raises:
        ValueError: as in `attention`, or ``mass`` does not fit the cache.
    """
    _check_query_heads(query, cache)
    page, capacity = cache.shape[2], cold_capacity(cache, bits)
    _check_slots("mass", mass, cache, max(page, capacity))
    pages = [_pages(cache, *request) for request in zip(table.long(), cold, hot, strict=False)]
    for (old, new), clear in zip(pages, fresh.tolist(), strict=True):
        if clear:
            mass[old, :, :capacity] = 0
            mass[new, :, :page] = 0
    for request, (start, end) in enumerate(pairwise(starts.tolist())):
        counted = start + max(int(first[request]), 0)
        if counted >= end:
            continue
        row = table[request].long()
        keys, _ = _tokens(cache, row, int(cold[request]), int(hot[request]), bits, order)
        parts = _weights(query, keys, counted, end, scale, softcap, sinks)
        given = sum(weights.mean(1).sum(1).T for _, weights in parts)
        where = _slots(*pages[request], capacity, page)
        mass.mT.index_put_([x[: len(given)] for x in where], given, accumulate=True)


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
    scores: Tensor | None = None,
    side: Tensor | None = None,
    order: Order = "tiles",
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
        scores: None, or float32 ``[moves, heads, tokens of src]``, higher = keep: taken in place of
            the policy's, whose name may be anything then. They are given before the first move: of
            a page that an earlier move of the call writes, they must be those of what it writes.
        side: None, or float32 ``[num_blocks, heads, slots]``, written in place: a number per token,
            in the first slots of its page. Those of the tokens that stay go with them.
        order: of the pages' bytes.

    Raises:
        ValueError: an unknown option, the sources hold fewer tokens than must be written, or
            ``scores`` or ``side`` do not fit the pages.
    """
    source, target = cold_capacity(cache, from_bits), cold_capacity(cache, bits)
    score = _scores_of(policy, scores, src, cache, source)
    _check_slots("side", side, cache, max(source, target))
    for move, (pages, to, protect) in enumerate(zip(src.long(), dst.long(), sinks, strict=True)):
        keys, values = _by_head(*read_cold(cache, pages, from_bits, order))
        worth, keep = score(move, keys, values), len(to) * target
        best = select(worth, keep, protect=protect, granularity=granularity, scope=scope)
        keys, values = (
            _by_page(torch.take_along_dim(x, best[..., None], 1), to) for x in (keys, values)
        )
        write_cold(cache, to, keys, values, bits, order)
        if side is not None:
            _move_side(side, pages, to, source, target, best)


def drop(
    cache: Tensor,
    src: Tensor,
    dst: Tensor,
    sinks: Tensor,
    policy: str,
    bits: int,
    scores: Tensor | None = None,
    side: Tensor | None = None,
    order: Order = "tiles",
) -> None:
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
        scores: as in `collapse`.
        side: as in `collapse`.
        order: of the pages' bytes.

    Raises:
        ValueError: unknown ``bits`` or ``policy``, more pages to write than to read, or ``scores``
            or ``side`` do not fit the pages.
    """
    raw, tokens = page_bytes(cache), cold_capacity(cache, bits)
    score = _scores_of(policy, scores, src, cache, tokens)
    _check_slots("side", side, cache, tokens)
    for move, (pages, to, protect) in enumerate(zip(src.long(), dst.long(), sinks, strict=True)):
        worth = score(move, *_by_head(*read_cold(cache, pages, bits, order)))
        means = worth.unflatten(-1, (len(pages), tokens)).contiguous().mean(-1)
        best = select(means, len(to), protect=(protect + tokens - 1) // tokens)
        kept = torch.take_along_dim(raw[pages].transpose(0, 1), best[..., None], 1)
        raw.index_copy_(0, to, kept.transpose(0, 1))
        if side is not None:
            whole = best[..., None] * tokens + torch.arange(tokens, device=best.device)
            _move_side(side, pages, to, tokens, tokens, whole.flatten(1))


def _scores_of(
    policy: str, scores: Tensor | None, src: Tensor, cache: Tensor, tokens: int
) -> Callable[[int, Tensor, Tensor], Tensor]:
    """The scores of a move's tokens: those that are given, else the policy's of keys and values."""
    if scores is None:
        if policy not in SCORES:
            raise ValueError(f"The policy {policy!r} is not one of {', '.join(SCORES)}.")
        return lambda _, keys, values: SCORES[policy](keys, values)
    shape = (len(src), cache.shape[1], src.shape[1] * tokens)
    if scores.shape != shape or scores.dtype != torch.float32:
        raise ValueError(
            f"scores must be float32 {shape}, not {scores.dtype} {tuple(scores.shape)}."
        )
    return lambda move, *_: scores[move]


def _check_slots(name: str, table: Tensor | None, cache: Tensor, tokens: int) -> None:
    """A table with a number for each slot must have room for pages of ``tokens`` tokens."""
    if table is None:
        return
    blocks, heads = cache.shape[:2]
    fits = table.ndim == 3 and table.shape[:2] == (blocks, heads) and table.shape[2] >= tokens
    if not fits or table.dtype != torch.float32:
        raise ValueError(
            f"{name} must be float32 [{blocks}, {heads}, {tokens} or more], "
            f"not {table.dtype} {list(table.shape)}."
        )


def _move_side(
    side: Tensor, pages: Tensor, to: Tensor, source: int, target: int, best: Tensor
) -> None:
    """Numbers of the ``best`` ``[heads, kept]`` tokens of some pages, to those that they went to.

    ``source`` and ``target`` are the tokens of a page of each.
    """
    numbers = side[pages, :, :source].transpose(0, 1).flatten(1)
    kept = numbers.gather(1, best).unflatten(1, (len(to), target))
    side[to, :, :target] = kept.transpose(0, 1)


def _check_query_heads(query: Tensor, cache: Tensor) -> None:
    heads, query_heads = cache.shape[1], query.shape[1]
    if query_heads % heads:
        raise ValueError(f"{query_heads} query heads cannot share {heads} KV heads.")


def _by_head(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Two ``[pages, heads, tokens, dim]`` to ``[heads, pages * tokens, dim]``."""
    return keys.transpose(0, 1).flatten(1, 2), values.transpose(0, 1).flatten(1, 2)


def _by_page(tokens: Tensor, pages: Tensor) -> Tensor:
    """``[heads, pages * tokens, dim]`` to ``[pages, heads, tokens, dim]``."""
    return tokens.unflatten(1, (len(pages), -1)).transpose(0, 1)


def _pages(cache: Tensor, row: Tensor, cold: Tensor, hot: Tensor) -> tuple[Tensor, Tensor]:
    """The cold and the hot pages in a request's row of the table."""
    old, new = int(cold), -(-int(hot) // cache.shape[2])
    return row[:old], row[old : old + new]


def _slots(cold: Tensor, hot: Tensor, capacity: int, page: int) -> tuple[Tensor, Tensor]:
    """The page, and the place in it, of each token that some cold and hot pages have room for."""
    old, new = torch.arange(capacity), torch.arange(page)
    pages = torch.cat([cold.repeat_interleave(capacity), hot.repeat_interleave(page)])
    return pages, torch.cat([old.repeat(len(cold)), new.repeat(len(hot))]).to(pages.device)


def _tokens(
    cache: Tensor, row: Tensor, cold: int, hot: int, bits: int, order: Order = "tiles"
) -> list[Tensor]:
    """Keys and values of a request, float32 ``[heads, tokens, head_size]``."""
    pages = -(-hot // cache.shape[2])
    old = _by_head(*read_cold(cache, row[:cold], bits, order))
    new = _by_head(*read_pages(cache, row[cold : cold + pages], order))
    # Cut, not masked: 0 * NaN from what no token has been written to would be NaN.
    return [torch.cat([a.float(), b[:, :hot].float()], 1) for a, b in zip(old, new, strict=True)]


def _weights(
    query: Tensor,
    keys: Tensor,
    start: int,
    end: int,
    scale: float,
    softcap: float,
    sinks: Tensor | None,
) -> Iterator[tuple[slice, Tensor]]:
    """The softmax of rows ``start`` to ``end``, the newest of a request with these ``keys``.

    Yields:
        Some rows, and what each gives to each token, ``[heads, group, rows, tokens]``.
    """
    heads, tokens = keys.shape[:2]
    rows = max(1, LOGITS // (query.shape[1] * tokens))
    for first in range(start, end, rows):
        part = slice(first, min(first + rows, end))
        groups = query[part].float().transpose(0, 1).unflatten(0, (heads, -1))
        logits = groups @ keys[:, None].mT * scale
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        position = tokens - end + torch.arange(first, part.stop, device=query.device)
        hidden = torch.arange(tokens, device=query.device) > position[:, None]
        logits = logits.masked_fill(hidden, -torch.inf)
        if sinks is not None:
            extra = sinks.float().view(heads, -1, 1, 1).expand(*logits.shape[:-1], 1)
            logits = torch.cat([logits, extra], -1)
        yield part, logits.softmax(-1)[..., :tokens]
