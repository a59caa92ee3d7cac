# SPDX-License-Identifier: Apache-2.0
"""The ops on pages on GPUs, by the kernels of `csrc/cuda/`.

What they do is what `entropykv_vllm.kernels.reference` does with order "rows", but a call of
`collapse` or `drop` carries out its moves on all layers of a page group, and all its moves at once.
So its moves must be independent, as `entropykv_vllm.pages.waves` makes them: no move reads or
writes what another one of the call has written; but a later one may write what an earlier one
reads. No call waits for the GPU, and none checks page ids or slots, since that would.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from entropykv_vllm.kernels.formats import cold_capacity
from entropykv_vllm.plan.capacity import head_bytes, quantized_bytes

#: What runs the ops; tests put the emulated ones here.
_OPS: Any = torch.ops.entropykv


@lru_cache(maxsize=1)
def load() -> bool:
    """Register the operators in this process; False without a GPU, or if they were not built."""
    if not torch.cuda.is_available():
        return False
    try:
        importlib.import_module("entropykv_vllm._C_cuda")
    except ImportError:
        return False
    for name in ("cuda_write", "cuda_collapse", "cuda_drop"):
        torch.library.register_fake(f"entropykv::{name}")(_nothing)
    return True


def _nothing(*args, **kwargs) -> None:
    """What these operators return: they write into their arguments."""


def write(key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Store new tokens in hot pages; can be captured in a CUDA graph.

    Args:
        key: float ``[tokens, heads, head_size]``, a token's heads side by side; its address and
            the step from token to token are multiples of 16 bytes.
        value: the same.
        cache: float ``[num_blocks, heads, page, 2 * head_size]``, written in place.
        slots: int64 ``[tokens]``, page * page length + offset; negative: skip the token.

    Raises:
        RuntimeError: a shape, type or alignment that the kernels do not take.
    """
    _OPS.cuda_write(key, value, cache, slots)


def collapse(
    caches: Sequence[Tensor],
    src: Tensor,
    dst: Tensor,
    sinks: Tensor,
    policy: str,
    granularity: str,
    scope: str,
    from_bits: int,
    bits: int,
    scores: Tensor | None = None,
    side: Sequence[Tensor] | None = None,
    apart: bool = False,
) -> None:
    """On each layer, write the best tokens of the pages of each move to cold ones.

    Args:
        caches: one of each layer, of one shape and strides, written in place.
        src: int64 ``[moves, s]``, as all integers on the device of the caches.
        dst: int64 ``[moves, m]``; no page twice in a call.
        sinks: int64 ``[moves]``.
        policy: a name in `entropykv_vllm.kernels.native.SCORES`; anything if there are ``scores``.
        granularity: "token" or "block".
        scope: "head" or "layer".
        from_bits: of the pages in ``src``, 16 for hot ones.
        bits: of the pages in ``dst``.
        scores: float32 ``[layers, moves, heads, tokens of src]``, in place of the policy's.
        side: of each layer, float32 ``[num_blocks, heads, slots]``, written in place.
        apart: no page of ``dst`` is one of ``src``, so the kernels may write to it at once, which
            is faster.

    Raises:
        RuntimeError: an unknown option, or shapes that do not fit each other.
    """
    choice = policy, granularity, scope, from_bits, bits, apart
    _OPS.cuda_collapse(list(caches), src, dst, sinks, *choice, scores, list(side or ()))


def drop(
    caches: Sequence[Tensor],
    src: Tensor,
    dst: Tensor,
    sinks: Tensor,
    policy: str,
    bits: int,
    scores: Tensor | None = None,
    side: Sequence[Tensor] | None = None,
    apart: bool = False,
) -> None:
    """On each layer, copy the best of the cold pages of each move, head by head, whole.

    Args:
        caches: as in `collapse`, and so are all arguments that are not described here.
        src: int64 ``[moves, s]``, cold pages.
        dst: int64 ``[moves, m]``.
        sinks: int64 ``[moves]``.
        policy: whose mean score over its tokens makes a page good.
        bits: of the pages.
        scores: float32 ``[layers, moves, heads, tokens of src]``.
        side: float32 ``[num_blocks, heads, slots]`` of each layer.
        apart: as in `collapse`.

    Raises:
        RuntimeError: as in `collapse`.
    """
    choice = policy, bits, apart
    _OPS.cuda_drop(list(caches), src, dst, sinks, *choice, scores, list(side or ()))


def collapse_bytes(
    caches: Sequence[Tensor], src: Tensor, dst: Tensor, from_bits: int, bits: int
) -> int:
    """Bytes that a collapse must read and write at least: its sources once, and what it makes.

    Args:
        caches: as in `collapse`.
        src: as in `collapse`.
        dst: as in `collapse`.
        from_bits: as in `collapse`.
        bits: as in `collapse`.
    """
    read = src.numel() * _page_bytes(caches[0], from_bits)
    return len(caches) * (read + dst.numel() * _page_bytes(caches[0], bits))


def _page_bytes(cache: Tensor, bits: int) -> int:
    """Bytes in use of a page, all heads."""
    heads, page, width = cache.shape[1:]
    if bits == 16:
        return heads * head_bytes(width // 2, page, cache.element_size())
    return heads * quantized_bytes(cold_capacity(cache, bits), width // 2, bits)
