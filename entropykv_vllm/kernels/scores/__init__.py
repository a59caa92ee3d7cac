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

from torch import Tensor

from entropykv_vllm.kernels.scores import (
    entropykv,
    h2o,
    keydiff,
    knorm,
    norm,
    position,
    random,
    snapkv,
    tova,
)

Score = Callable[[Tensor, Tensor], Tensor]
MassScore = Callable[[Tensor], Tensor]

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


@dataclass(frozen=True)
class Observed:
    """A score of attention masses.

    Attributes:
        score: from masses ``[..., heads, tokens]``.
        queries: how many of the queries before a boundary add to the mass; None: all so far.
    """

    score: MassScore
    queries: int | None


OBSERVED: dict[str, Observed] = {
    "h2o": Observed(h2o.score, None),
    "snapkv": Observed(snapkv.score, snapkv.QUERIES),
    "tova": Observed(tova.score, 1),
}
