# SPDX-License-Identifier: Apache-2.0
"""The original EntropyKV score: values that weigh much under keys that are short."""

from torch import Tensor

from entropykv_vllm.kernels.reduce import length, rows


def score(keys: Tensor, values: Tensor) -> Tensor:
    """``||v|| / ||k||``: float ``[..., tokens, head_size]`` to float32 ``[..., tokens]``."""
    return length(rows(values)) / length(rows(keys))
