# SPDX-License-Identifier: Apache-2.0
"""The attention op on GPUs."""

from __future__ import annotations

from torch import Tensor

from entropykv_vllm.kernels.gpu.attention_decode import Workspace, decode, new_workspace
from entropykv_vllm.kernels.gpu.attention_prefill import prefill


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
    *,
    longest: int,
    workspace: Workspace | None = None,
) -> None:
    """As `kernels.reference.attention` over pages in rows, without a word from device to host.

    Requests with one new token are decoded and those with more are not, whatever else is in the
    batch, so a request's numbers do not depend on its company. Requests without new tokens are
    skipped: a captured CUDA graph pads its batch with them.

    Args:
        query: the last dimension contiguous, as in ``output``, ``table`` and ``cache``.
        sinks: float32.
        longest: no request has more new tokens than this.
        workspace: see `attention_decode.new_workspace`; None: made for this call. To replay a
            graph, or to spend less memory, make it once.
        cache: these and the rest as there.

    Raises:
        ValueError: unknown ``bits``, query heads that the heads do not divide, or a workspace for
            fewer requests or other heads.
    """
    if query.shape[1] % cache.shape[1]:
        raise ValueError(f"{query.shape[1]} query heads cannot share {cache.shape[1]} KV heads.")
    if workspace is None:
        workspace = new_workspace(len(cold), query.shape[1], query.shape[2], query.device)
    rest = query, cache, output, starts, table, cold, hot, bits, scale, softcap, sinks
    decode(*rest, workspace)
    if longest > 1:
        prefill(*rest, longest)
