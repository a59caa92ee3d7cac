# SPDX-License-Identifier: Apache-2.0
"""Could the keys and values of ordinary text tell which layers are sensitive, without a scan?

Each signal is one number a layer, the mean over its heads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from entropykv_vllm.kernels.scores.entropykv import score
from entropykv_vllm.kernels.scores.keydiff import cosine_to_mean

#: Keys and values `[heads, tokens, head_size]` to one number.
Signal = Callable[[Tensor, Tensor], Tensor]


def _variation(x: Tensor) -> Tensor:
    """Standard deviation over the tokens, by the mean."""
    return (x.std(-1) / x.mean(-1)).mean()


def _peaks(x: Tensor) -> Tensor:
    """The share of the sum that the highest twentieth of the tokens has."""
    top = x.topk(max(1, x.shape[-1] // 20), -1).values
    return (top.sum(-1) / x.sum(-1)).mean()


def _dimensions(x: Tensor) -> Tensor:
    """How many directions the tokens take up: the participation ratio of their covariance."""
    centred = x - x.mean(-2, keepdim=True)
    spectrum = torch.linalg.svdvals(centred).square()
    return (spectrum.sum(-1).square() / spectrum.square().sum(-1)).mean()


def _neighbours(x: Tensor) -> Tensor:
    """Mean cosine of each token to the one before it."""
    return torch.cosine_similarity(x[..., 1:, :], x[..., :-1, :], -1).mean()


SIGNALS: dict[str, Signal] = {
    "mean distinctness of keys": lambda k, v: (1 - cosine_to_mean(k)).mean(),
    "variation of the distinctness": lambda k, v: _variation(1 - cosine_to_mean(k)),
    "variation of key norms": lambda k, v: _variation(k.norm(dim=-1)),
    "variation of value norms": lambda k, v: _variation(v.norm(dim=-1)),
    "mean norm of values": lambda k, v: v.norm(dim=-1).mean(),
    "share of the score in its peaks": lambda k, v: _peaks(score(k, v)),
    "dimensions of keys": lambda k, v: _dimensions(k),
    "dimensions of values": lambda k, v: _dimensions(v),
    "likeness of neighbouring keys": lambda k, v: _neighbours(k),
    "likeness of neighbouring values": lambda k, v: _neighbours(v),
}


def measure(rows: Sequence[tuple[Tensor, Tensor]]) -> dict[str, list[float]]:
    """Return each signal of each layer.

    Args:
        rows: keys and values ``[tokens, heads, head_size]`` of each layer, of one text.
    """
    layers = [(k.transpose(0, 1).float(), v.transpose(0, 1).float()) for k, v in rows]
    return {name: [float(f(k, v)) for k, v in layers] for name, f in SIGNALS.items()}


def agreement(
    found: Mapping[str, Sequence[float]], sensitivity: Sequence[float], top: int
) -> list[tuple[str, float, int]]:
    """Return each signal's rank correlation with a scan, and how many of its `top` layers it finds.

    The strongest correlation first; a signal may point either way.
    """
    result = []
    best = _top(sensitivity, top)
    for name, values in found.items():
        correlation = spearman(values, sensitivity)
        sign = 1 if correlation >= 0 else -1
        mine = _top([sign * value for value in values], top)
        result.append((name, correlation, len(best & mine)))
    return sorted(result, key=lambda row: -abs(row[1]))


def _top(values: Sequence[float], count: int) -> set[int]:
    return set(sorted(range(len(values)), key=lambda i: -values[i])[:count])


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """The rank correlation of two lists without ties."""
    ranks = torch.stack([torch.tensor(x).argsort().argsort().double() for x in (a, b)])
    return float(torch.corrcoef(ranks)[0, 1])
