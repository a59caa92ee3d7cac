# SPDX-License-Identifier: Apache-2.0
"""Token scores, one small file each; higher means keep.

An attention-free score maps ``keys, values`` (float tensors ``[..., tokens, head_size]``) to
float32 ``[..., tokens]``. It reads nothing but its own segment, layer and head, is computed in
float32, is never NaN for finite inputs, and gives each segment the same bits whatever else is in
the batch.

A score that reads attention maps the mass of each slot, float32 ``[..., heads, tokens]``, to
float32 of the same shape. The mass of a KV head is the mean over the query heads of its group of
the attention probabilities, summed over queries.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

from torch import Tensor

from entropykv_vllm.config.policies import MODULES

Score = Callable[[Tensor, Tensor], Tensor]
MassScore = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Observed:
    """A score of attention masses.

    Attributes:
        score: from masses ``[..., heads, tokens]``.
        queries: how many of the queries before a boundary add to the mass; None: all so far.
    """

    score: MassScore
    queries: int | None


_FOUND = {policy: import_module(f"{__name__}.{module}") for policy, module in MODULES.items()}

#: The attention-free scores, by policy.
SCORES: dict[str, Score] = {
    policy: found.score for policy, found in _FOUND.items() if not hasattr(found, "QUERIES")
}

#: The scores that read attention, by policy: their modules say how many QUERIES count.
OBSERVED: dict[str, Observed] = {
    policy: Observed(found.score, found.QUERIES)
    for policy, found in _FOUND.items()
    if hasattr(found, "QUERIES")
}
