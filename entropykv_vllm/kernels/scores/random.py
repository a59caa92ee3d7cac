# SPDX-License-Identifier: Apache-2.0
"""A control: which tokens stay does not depend on what they mean."""

import torch
from torch import Tensor

from entropykv_vllm.kernels.reduce import rows

# 64-bit odd constants (golden ratio; the finalizer of MurmurHash3) as signed integers.
_WEIGHT = 0x9E3779B97F4A7C15 - 2**64
_MIX = 0xFF51AFD7ED558CCD - 2**64


def score(keys: Tensor, values: Tensor) -> Tensor:
    """A hash of the key's bits, uniform in [0, 1).

    Drawn from the content and not from a generator: the same tokens get the same scores in any
    batch, order or process.

    Args:
        keys: float ``[..., tokens, head_size]``.
        values: not read.

    Returns:
        float32 ``[..., tokens]``.
    """
    bits = rows(keys).view(torch.int32).to(torch.int64)
    # Integer sums wrap and commute, so the order of the reduction is free.
    weights = (2 * torch.arange(bits.shape[-1], device=bits.device) + 1) * _WEIGHT
    mixed = (bits * weights).sum(-1)
    for _ in range(2):
        mixed = (mixed ^ (mixed >> 33)) * _MIX
    return ((mixed >> 40) & 0xFFFFFF).to(torch.float32) / 2**24
