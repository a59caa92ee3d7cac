# SPDX-License-Identifier: Apache-2.0
"""Attention-free token scores, one small file each.

A score maps ``keys, values`` (float tensors ``[..., tokens, head_size]``) to float32
``[..., tokens]``; higher means keep. It reads nothing but its own segment, layer and head, is
computed in float32, is never NaN for finite inputs, and gives each segment the same bits whatever
else is in the batch.
"""

from collections.abc import Callable

from torch import Tensor

from entropykv_vllm.kernels.scores import entropykv, keydiff, knorm, norm, position, random

Score = Callable[[Tensor, Tensor], Tensor]

SCORES: dict[str, Score] = {
    "entropykv": entropykv.score,
    "norm": norm.score,
    "knorm": knorm.score,
    "keydiff": keydiff.score,
    "random": random.score,
    # Both keep no old tokens but the first ones; they differ in the sinks of the plan.
    "sink": position.score,
    "window": position.score,
}
