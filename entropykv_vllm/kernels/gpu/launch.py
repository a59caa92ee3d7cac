# SPDX-License-Identifier: Apache-2.0
"""What a launch of a kernel must be told about the pages and the machine."""

from __future__ import annotations

import math
import os
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from entropykv_vllm.kernels.formats import cold_capacity
from entropykv_vllm.plan.capacity import GROUP

_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter: on CPUs, in numpy, for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@lru_cache(maxsize=8)
def is_turing(device: torch.device) -> bool:
    """Whether it is a GPU before Ampere, with 64 KB of shared memory."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0)


def dot_type(dtype: torch.dtype) -> tl.dtype:
    """The type of the factors of matrix products over a cache of this dtype.

    On GPUs it is the cache's, which is what matrix units are fast at. The interpreter's arithmetic
    on bfloat16 is wrong (it computes with the bits as integers), so there it is float32.
    """
    return tl.float32 if interpreted() else _TYPES[dtype]


def kind_of(dtype: torch.dtype) -> tl.dtype:
    """A cache's dtype, as a kernel's constant."""
    return _TYPES[dtype]


def units(scale: float, softcap: float) -> tuple[float, float]:
    """The factor of products, and the cap of logits, as the kernels take them.

    Weights are powers of 2, so that log2(e) is in the scale, unless a cap comes between.
    """
    return (scale if softcap else scale * math.log2(math.e)), softcap


def padded(head_size: int) -> int:
    """Channels of half a head in a tile: a power of two, at least what matrix units take."""
    return max(16, triton.next_power_of_2(head_size // 2))


def format_of(cache: Tensor, bits: int) -> dict[str, Any]:
    """How the pages of a cache are laid out, as the kernels' constants.

    Raises:
        ValueError: unknown ``bits``, or the cache cannot hold cold pages of them.
    """
    page, head_size = cache.shape[2], cache.shape[3] // 2
    return {
        "BITS": bits,
        "PAGE": page,
        "CAPACITY": cold_capacity(cache, bits),
        "GROUP": GROUP,
        "HEAD_SIZE": head_size,
        "HALF": padded(head_size),
    }
