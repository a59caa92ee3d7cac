# SPDX-License-Identifier: Apache-2.0
"""The collapse: the best tokens of some pages move into fewer pages."""

from collections.abc import Sequence

import torch
from torch import Tensor

from entropykv_vllm.kernels.layout import read_pages, write_pages
from entropykv_vllm.kernels.scores import Score
from entropykv_vllm.kernels.select import select

# Bytes of pages that are read at once: small enough for a core's cache, large enough that the
# cost of calling torch does not matter.
CHUNK_BYTES = 4 << 20


def collapse(
    caches: Sequence[Tensor],
    src: Tensor,
    dst: Tensor,
    *,
    score: Score,
    sinks: Sequence[int] | Tensor,
    isa: str,
    granularity: str = "token",
    scope: str = "head",
    block: int = 16,
) -> None:
    """Write the best tokens of the pages ``src`` to the pages ``dst``, in order, in each layer.

    In each layer every page of ``src`` is read before any page of ``dst`` is written, so a page
    may be both, in the same move or in two. No other page is read or written.

    Args:
        caches: the layers' caches ``[num_blocks, heads, block_size, 2 * head_size]``, alike.
        src: int64 ``[n, s]``, the pages of each of n moves, oldest first.
        dst: int64 ``[n, m]``, 1 <= m < s, all different.
        score: one of `entropykv_vllm.kernels.scores.SCORES`.
        sinks: ``[n]``, the leading tokens of each move that must stay.
        isa: the caches' layout, see `entropykv_vllm.kernels.layout`.
        granularity: "token" or "block", see `entropykv_vllm.kernels.select.select`.
        scope: "head" or "layer", see there.
        block: length of a run where granularity is "block".

    Raises:
        ValueError: the shapes do not fit, or an option is unknown.
    """
    sinks = torch.as_tensor(sinks, dtype=torch.int64, device=src.device)
    _check(src, dst, sinks)
    if not len(src) or not caches:
        return
    options = {"granularity": granularity, "scope": scope, "block": block}
    layers_at_once, size = _chunk(caches[0], src)
    parts = list(zip(src.split(size), dst.split(size), sinks.split(size), strict=True))
    for start in range(0, len(caches), layers_at_once):
        layers = caches[start : start + layers_at_once]
        kept = [_survivors(layers, *part, score, isa, options) for part in parts]
        for (_, pages, _), (keys, values) in zip(parts, kept, strict=True):
            for cache, layer_keys, layer_values in zip(layers, keys, values, strict=True):
                write_pages(cache, pages, layer_keys, layer_values, isa)


def _check(src: Tensor, dst: Tensor, sinks: Tensor) -> None:
    if src.ndim != 2 or dst.ndim != 2 or not len(src) == len(dst) == len(sinks):
        raise ValueError("src, dst and sinks must have one row per move.")
    if len(src) and not 1 <= dst.shape[1] < src.shape[1]:
        raise ValueError(f"{src.shape[1]} pages cannot be collapsed into {dst.shape[1]}.")


def _chunk(cache: Tensor, src: Tensor) -> tuple[int, int]:
    """How many layers and moves to read at once."""
    move = cache[0].numel() * cache.element_size() * src.shape[1]
    at_once = max(1, CHUNK_BYTES // move)
    return max(1, at_once // len(src)), min(len(src), at_once)


def _survivors(
    caches: Sequence[Tensor],
    src: Tensor,
    dst: Tensor,
    sinks: Tensor,
    score: Score,
    isa: str,
    options: dict,
) -> tuple[Tensor, Tensor]:
    """Keys and values that stay, ``[layers, n, m, heads, block_size, head_size]``."""
    block_size = caches[0].shape[2]
    pages = [read_pages(cache, src, isa) for cache in caches]
    keys, values = (_by_head(side) for side in zip(*pages, strict=True))
    best = select(score(keys, values), dst.shape[1] * block_size, protect=sinks, **options)
    return _by_page(_take(keys, best), block_size), _by_page(_take(values, best), block_size)


def _by_head(layers: Sequence[Tensor]) -> Tensor:
    """Each ``[n, s, heads, block, dim]``, to ``[layers, n, heads, s * block, dim]``."""
    return torch.stack([pages.transpose(1, 2) for pages in layers]).flatten(3, 4)


def _by_page(tokens: Tensor, block_size: int) -> Tensor:
    """``[layers, n, heads, m * block, dim]`` to ``[layers, n, m, heads, block, dim]``."""
    return tokens.unflatten(3, (-1, block_size)).transpose(2, 3)


def _take(tokens: Tensor, best: Tensor) -> Tensor:
    """Rows ``best`` ``[..., keep]`` of ``tokens`` ``[..., tokens, dim]``."""
    flat = tokens.flatten(0, -2)
    first = torch.arange(0, len(flat), tokens.shape[-2], device=flat.device)
    return flat.index_select(0, (best.flatten(0, -2) + first[:, None]).flatten()).view(
        *best.shape, -1
    )
