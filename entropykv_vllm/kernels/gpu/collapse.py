# SPDX-License-Identifier: Apache-2.0
"""The moves on GPUs: batched over moves, layers and heads.

What is read goes to a workspace before anything is written, since a page that one move reads may be
written by another. Choosing the tokens is torch on the device; nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from entropykv_vllm.kernels.formats import cold_capacity
from entropykv_vllm.kernels.gpu.pack import pack
from entropykv_vllm.kernels.gpu.pages import copy_in, copy_out
from entropykv_vllm.kernels.gpu.token_scores import token_scores
from entropykv_vllm.kernels.select import select


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
) -> None:
    """`kernels.reference.collapse` of several layers at once, over pages in rows.

    Args:
        caches: of the layers, alike.
        src: int64 ``[moves, s]``, on the CPU or the device. On the CPU, where plans are made, moves
            that read what earlier ones write are held back until that is written; on the device
            there must be none.
        dst: int64 ``[moves, m]``, where ``src`` is.
        sinks: integers ``[moves]``.
        scores: None, or float32 ``[layers, moves, heads, tokens of src]`` on the device.
        side: None, or of each layer float32 ``[num_blocks, heads, slots]``.
        policy: this and the rest as there.

    Raises:
        ValueError: as there, or the caches are not alike.
    """
    source, target = cold_capacity(caches[0], from_bits), cold_capacity(caches[0], bits)
    _check_scores(scores, caches, src, source)
    keep = dst.shape[1] * target
    for part in _independent(src, dst):
        pages, to, protect = (
            x[part].to(caches[0].device, non_blocking=True) for x in (src, dst, sinks)
        )
        worth = (
            token_scores(caches, pages, policy, from_bits) if scores is None else scores[:, part]
        )
        best = select(worth, keep, protect=protect, granularity=granularity, scope=scope)
        packed = pack(caches, pages, best.contiguous(), from_bits, bits)
        copy_in(caches, to.flatten(), packed)
        _move_sides(side, pages, to, source, target, best)


def drop(
    caches: Sequence[Tensor],
    src: Tensor,
    dst: Tensor,
    sinks: Tensor,
    policy: str,
    bits: int,
    scores: Tensor | None = None,
    side: Sequence[Tensor] | None = None,
) -> None:
    """`kernels.reference.drop` of several layers at once, over pages in rows.

    Args:
        caches: this and the rest as in `collapse` here.

    Raises:
        ValueError: as in `collapse`.
    """
    tokens = cold_capacity(caches[0], bits)
    _check_scores(scores, caches, src, tokens)
    for part in _independent(src, dst):
        pages, to, protect = (
            x[part].to(caches[0].device, non_blocking=True) for x in (src, dst, sinks)
        )
        worth = token_scores(caches, pages, policy, bits) if scores is None else scores[:, part]
        means = worth.unflatten(-1, (src.shape[1], tokens)).contiguous().mean(-1)
        best = select(means, dst.shape[1], protect=(protect + tokens - 1) // tokens)
        every = pages[None, :, None].expand(*best.shape[:3], -1).gather(-1, best)
        packed = copy_out(caches, every.transpose(2, 3).flatten(1, 2))
        copy_in(caches, to.flatten(), packed)
        whole = best[..., None] * tokens + torch.arange(tokens, device=best.device)
        _move_sides(side, pages, to, tokens, tokens, whole.flatten(-2))


def _independent(src: Tensor, dst: Tensor) -> Iterator[slice]:
    """Runs of moves of which none reads or writes what an earlier one of its run writes."""
    if src.device.type != "cpu" or not len(src):
        yield from [slice(0, len(src))] if len(src) else []
        return
    first, written = 0, set[int]()
    for move, (pages, to) in enumerate(zip(src.tolist(), dst.tolist(), strict=True)):
        if not written.isdisjoint(pages + to):
            yield slice(first, move)
            first, written = move, set()
        written.update(to)
    yield slice(first, len(src))


def _check_scores(
    scores: Tensor | None, caches: Sequence[Tensor], src: Tensor, tokens: int
) -> None:
    shape = len(caches), len(src), caches[0].shape[1], src.shape[1] * tokens
    if scores is not None and (scores.shape != shape or scores.dtype != torch.float32):
        raise ValueError(
            f"scores must be float32 {shape}, not {scores.dtype} {tuple(scores.shape)}."
        )


def _move_sides(
    sides: Sequence[Tensor] | None,
    pages: Tensor,
    to: Tensor,
    source: int,
    target: int,
    best: Tensor,
) -> None:
    """Numbers of the ``best`` ``[layers, moves, heads, kept]`` tokens, to where those went."""
    for side, mine in zip(sides or (), best, strict=False):
        numbers = side[pages, :, :source].transpose(1, 2).flatten(2)
        kept = numbers.gather(-1, mine).unflatten(-1, (to.shape[1], target))
        side[to, :, :target] = kept.transpose(1, 2)
