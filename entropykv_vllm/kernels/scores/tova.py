# SPDX-License-Identifier: Apache-2.0
"""TOVA (arXiv 2401.06104): what the last query attended to, one choice for all heads."""

import torch
from torch import Tensor

from entropykv_vllm.kernels.reduce import tree_sum

QUERIES = 1


def score(mass: Tensor) -> Tensor:
    """The mass of the last query, averaged over the heads.

    Args:
        mass: float ``[..., heads, tokens]``.

    Returns:
        float32 ``[..., heads, tokens]``, the same for all heads.
    """
    mean = tree_sum(mass.to(torch.float32)) / mass.shape[-2]
    return mean.unsqueeze(-2).expand(mass.shape)
