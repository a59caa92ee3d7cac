# SPDX-License-Identifier: Apache-2.0
"""Key norm (arXiv 2406.11430): keys of low norm attract attention."""

from torch import Tensor

from entropykv_vllm.kernels.reduce import length, rows


def score(keys: Tensor, values: Tensor) -> Tensor:
    """``-||k||``: float ``[..., tokens, head_size]`` to float32 ``[..., tokens]``."""
    return -length(rows(keys))
