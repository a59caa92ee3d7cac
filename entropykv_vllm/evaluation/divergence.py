# SPDX-License-Identifier: Apache-2.0
"""How far next-token distributions are from those of the full cache."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from entropykv_vllm.evaluation import scoring


def kl(full: Tensor, other: Tensor) -> Tensor:
    """KL(full || other) in nats, float64 `[steps]`, of log-probabilities `[steps, vocabulary]`.

    Rounding can make the sum of two nearly equal distributions negative, a divergence never is.
    """
    p, q = full.double(), other.double()
    return (p.exp() * (p - q)).sum(-1).clamp(min=0)


def agrees(full: Tensor, other: Tensor) -> Tensor:
    """Whether the likeliest token is the same, bool `[steps]`."""
    return full.argmax(-1) == other.argmax(-1)


def compare(full: Tensor, other: Tensor) -> dict[str, list[float]]:
    """Return the values of each step of one text."""
    return {
        "kl": [round(value, 9) for value in kl(full, other).tolist()],
        "top1": [float(same) for same in agrees(full, other).tolist()],
    }


def summary(texts: list[dict[str, list[float]]]) -> dict[str, list[float]]:
    """Return `[mean, low, high]` of the divergence and of the agreement.

    The intervals resample whole texts, as the steps of one text are alike.
    """
    found = {}
    for name in ("kl", "top1"):
        means = [sum(text[name]) / len(text[name]) for text in texts]
        found[name] = [sum(means) / len(means), *scoring.bootstrap(means)]
    return found


def nats(estimate: list[float]) -> str:
    """Write `[mean, low, high]` of a divergence with its 95 % interval."""
    mean, low, high = (f"{value:.2g}" if value < 0.1 else f"{value:.3f}" for value in estimate)
    return f"{mean} ({low}-{high})"


def brief(result: dict[str, Any]) -> dict[str, Any]:
    """Return a result without the values of its texts."""
    return {name: value for name, value in result.items() if name != "texts"}
