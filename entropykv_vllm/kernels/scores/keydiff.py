# SPDX-License-Identifier: Apache-2.0
"""KeyDiff (arXiv 2504.15364): keys unlike the others are the ones that get attended."""

from torch import Tensor

from entropykv_vllm.kernels.reduce import length, rows, tree_sum


def cosine_to_mean(keys: Tensor) -> Tensor:
    """Cosine of each key to the mean of the *unit* keys, so that long keys do not set the anchor.

    Args:
        keys: float ``[..., tokens, head_size]``.

    Returns:
        float32 ``[..., tokens]``.
    """
    keys = rows(keys)
    unit = keys / length(keys)[..., None]
    anchor = tree_sum(unit)
    anchor = anchor / length(anchor)[..., None]
    return (unit * anchor[..., None, :]).sum(-1)


def score(keys: Tensor, values: Tensor) -> Tensor:
    """``-cos(k, mean k)``: float ``[..., tokens, head_size]`` to float32 ``[..., tokens]``."""
    return -cosine_to_mean(keys)
