# SPDX-License-Identifier: Apache-2.0
"""Carrying out planned moves on GPUs: by CUDA kernels where they were built, else by Triton's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from entropykv_vllm.config.settings import EvictionConfig
from entropykv_vllm.kernels import cuda, native
from entropykv_vllm.kernels.formats import read_cold
from entropykv_vllm.kernels.gpu import collapse as triton
from entropykv_vllm.kernels.moves import Batch
from entropykv_vllm.kernels.scores import SCORES


def carry_out(
    caches: Sequence[Tensor], batch: Batch, settings: EvictionConfig, apart: bool = False
) -> None:
    """Carry out moves on the pages of some layers, all at once.

    Args:
        caches: of the layers of a page group, alike, in rows, written in place.
        batch: moves that one call may hold (`pages.waves`), on the caches' device.
        settings: an attention-free policy and the selection.
        apart: no page is both read and written.
    """
    pages = batch.src, batch.dst, batch.sinks
    scores = _scores(caches, batch, settings.policy)
    ops = _ops(caches[0], apart)
    # Cold pages of 16 bits are hot pages to the kernels: their tokens compete again.
    if batch.kind == "drop" and batch.bits < 16:
        ops["drop"](caches, *pages, settings.policy, batch.bits, scores)
        return
    bits = batch.bits_read, batch.bits
    ops["collapse"](caches, *pages, settings.policy, *settings.selection, *bits, scores)


def _ops(cache: Tensor, apart: bool) -> dict[str, Callable[..., None]]:
    if cache.is_cuda and cuda.load():
        return {name: partial(getattr(cuda, name), apart=apart) for name in ("collapse", "drop")}
    return {"collapse": triton.collapse, "drop": triton.drop}


def _scores(caches: Sequence[Tensor], batch: Batch, policy: str) -> Tensor | None:
    """Scores ``[layers, moves, heads, tokens]`` that the kernels do not know."""
    if policy in native.SCORES:
        return None
    return torch.stack([_of_layer(cache, batch, policy) for cache in caches])


def _of_layer(cache: Tensor, batch: Batch, policy: str) -> Tensor:
    read = read_cold(cache, batch.src, batch.bits_read, "rows")
    keys, values = (x.transpose(1, 2).flatten(2, 3) for x in read)
    return SCORES[policy](keys, values)


def description() -> str:
    """What runs the moves, for a log line."""
    return "CUDA and Triton" if cuda.load() else "Triton, as the CUDA kernels were not built"
