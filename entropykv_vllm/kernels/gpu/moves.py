# SPDX-License-Identifier: Apache-2.0
"""Carrying out planned moves on GPUs: by CUDA kernels where they were built, else by Triton's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from entropykv_vllm.config.settings import EvictionConfig
from entropykv_vllm.kernels import cuda, native
from entropykv_vllm.kernels.gpu import collapse as triton
from entropykv_vllm.kernels.gpu.token_scores import token_scores
from entropykv_vllm.kernels.moves import Batch


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
    known = settings.policy in native.SCORES
    scores = None if known else token_scores(caches, batch.src, settings.policy, batch.bits_read)
    ops = _ops(caches[0].is_cuda, apart)
    # Cold pages of 16 bits are hot pages to the kernels: their tokens compete again.
    if batch.kind == "drop" and batch.bits < 16:
        ops["drop"](caches, *pages, settings.policy, batch.bits, scores)
        return
    bits = batch.bits_read, batch.bits
    ops["collapse"](caches, *pages, settings.policy, *settings.selection, *bits, scores)


def _ops(on_gpu: bool, apart: bool) -> dict[str, Callable[..., None]]:
    if on_gpu and cuda.load():
        return {name: partial(getattr(cuda, name), apart=apart) for name in ("collapse", "drop")}
    return {"collapse": triton.collapse, "drop": triton.drop}


def description() -> str:
    """What runs the moves, for a log line."""
    return "CUDA and Triton" if cuda.load() else "Triton, as the CUDA kernels were not built"
