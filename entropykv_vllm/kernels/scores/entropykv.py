# SPDX-License-Identifier: Apache-2.0
"""The default: KeyDiff's distinctness (arXiv 2504.15364) times the value's norm, pooled.

Facts span several tokens, so a token shares its score with its neighbours.
"""

from torch import Tensor
from torch.nn.functional import avg_pool1d

from entropykv_vllm.kernels.reduce import length, rows
from entropykv_vllm.kernels.scores.keydiff import cosine_to_mean

NEIGHBOURS = 5


def score(keys: Tensor, values: Tensor) -> Tensor:
    """``(1 - cos(k, mean k)) * ||v||``, averaged over 5 neighbours.

    Args:
        keys: float ``[..., tokens, head_size]``.
        values: float ``[..., tokens, head_size]``.

    Returns:
        float32 ``[..., tokens]``.
    """
    # Rounding can put a cosine above 1.
    distinct = (1 - cosine_to_mean(keys)).clamp(min=0)
    return neighbourhood(distinct * length(rows(values)))


def neighbourhood(scores: Tensor) -> Tensor:
    """Moving average over the last dimension; tokens at an edge divide by fewer neighbours."""
    flat = scores.reshape(-1, 1, scores.shape[-1])
    mean = avg_pool1d(flat, NEIGHBOURS, 1, NEIGHBOURS // 2, count_include_pad=False)
    return mean.view(scores.shape)
