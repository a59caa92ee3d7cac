# SPDX-License-Identifier: Apache-2.0
"""SnapKV (arXiv 2404.14469): what the last queries attended to, shared with the neighbours."""

import torch
from torch import Tensor

from entropykv_vllm.kernels.scores.entropykv import neighbourhood

QUERIES = 32


def score(mass: Tensor) -> Tensor:
    """The mass of the last 32 queries, averaged over 5 neighbours.

    A token at an edge divides by the neighbours that it has. (kvpress divides by 5 there too, as
    if the missing ones had no mass; but most edges of a segment are not edges of the text.)

    Args:
        mass: float ``[..., heads, tokens]``.

    Returns:
        float32 ``[..., heads, tokens]``.
    """
    return neighbourhood(mass.to(torch.float32))
