# SPDX-License-Identifier: Apache-2.0
"""Which tokens stay, given their scores."""

import math

import torch
from torch import Tensor

from entropykv_vllm.kernels.reduce import EPS, tree_sum


def select(
    scores: Tensor,
    keep: int,
    *,
    protect: int | Tensor | None = None,
    granularity: str = "token",
    block: int = 16,
    scope: str = "head",
) -> Tensor:
    """The ``keep`` best tokens of each head, in the order of their positions.

    Of equal scores the earlier token stays, and NaN is worse than every number. Protected tokens
    come first whatever their scores; if there are more than ``keep``, the first ``keep`` stay.

    Args:
        scores: float ``[..., heads, tokens]``, higher = keep.
        keep: tokens to keep, 1 to ``tokens``.
        protect: number of leading tokens that stay; an int, or integers ``[...]``.
        granularity: "token", or "block" for whole runs of ``block`` tokens by their mean score.
            A run with one protected token is protected. If ``keep`` is no multiple of ``block``,
            runs are as long as the greatest common divisor of the two.
        block: length of a run; must divide ``tokens`` where granularity is "block".
        scope: "head", or "layer" for one choice for all heads: the sum over heads of their
            standardized scores.

    Returns:
        int64 ``[..., heads, keep]``, ascending.

    Raises:
        ValueError: ``keep``, ``block``, ``granularity`` or ``scope`` is out of its range.
    """
    heads, tokens = scores.shape[-2:]
    run = _run(granularity, block, keep, tokens)
    if scope == "layer":
        scores = tree_sum(_standardize(scores)).unsqueeze(-2)
    elif scope != "head":
        raise ValueError(f"scope must be 'head' or 'layer', not {scope!r}.")
    if run > 1:
        scores = scores.unflatten(-1, (-1, run)).contiguous().mean(-1)
    protect = torch.as_tensor(0 if protect is None else protect, device=scores.device)
    best = _best(scores, keep // run, (protect + run - 1) // run)
    if run > 1:
        best = (best[..., None] * run + torch.arange(run, device=best.device)).flatten(-2)
    return best.expand(*best.shape[:-2], heads, keep)


def _run(granularity: str, block: int, keep: int, tokens: int) -> int:
    """Length of the runs that stay or go together."""
    if not 1 <= keep <= tokens:
        raise ValueError(f"keep must be 1 to {tokens} tokens, not {keep}.")
    if granularity == "token":
        return 1
    if granularity != "block":
        raise ValueError(f"granularity must be 'token' or 'block', not {granularity!r}.")
    if block < 1 or tokens % block:
        raise ValueError(f"block must divide the {tokens} tokens, {block} does not.")
    return math.gcd(block, keep)


def _best(scores: Tensor, keep: int, protect: Tensor) -> Tensor:
    """Ascending indices of the ``keep`` best; ``protect`` broadcasts over ``[...]``."""
    # Ascending order of the negated scores: NaN sorts last. The sort is stable and the protected
    # tokens are the first ones, so they win even against tokens that score +inf.
    protected = torch.arange(scores.shape[-1], device=scores.device) < protect[..., None, None]
    cost = (-scores).masked_fill(protected, -torch.inf)
    return cost.argsort(dim=-1, stable=True)[..., :keep].sort(-1).values


def _standardize(scores: Tensor) -> Tensor:
    """Zero mean and unit variance over the finite scores of each head."""
    scores = scores.contiguous()
    finite = scores.isfinite()
    count = finite.sum(-1, keepdim=True).clamp(min=1)
    centred = scores - scores.where(finite, 0).sum(-1, keepdim=True) / count
    square = centred.where(finite, 0).square().sum(-1, keepdim=True)
    return centred / (square / count).sqrt().clamp(min=EPS)
