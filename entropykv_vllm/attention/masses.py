# SPDX-License-Identifier: Apache-2.0
"""How much attention each slot got, for the scores that read it: a table beside a layer's pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from entropykv_vllm.kernels.scores import OBSERVED
from entropykv_vllm.plan.schedule import TierPlan, next_boundary

_ATTRIBUTE = "entropykv_mass"


def give(layer: Any, plan: TierPlan) -> Tensor:
    """Give an attention layer of vLLM its table: float32 ``[pages, heads, slots]``."""
    pages, heads = layer.kv_cache.shape[:2]
    mass = torch.zeros(pages, heads, max(plan.page, plan.cold))
    setattr(layer, _ATTRIBUTE, mass)
    return mass


def of(layer: Any) -> Tensor | None:
    """The table of an attention layer, if it has one."""
    return getattr(layer, _ATTRIBUTE, None)


def forget(mass: Tensor, slots: Tensor, page: int) -> None:
    """Set the mass of new tokens to 0; `slots` are those of the write op."""
    new = slots[slots >= 0]
    mass[new // page, :, new % page] = 0


@dataclass(frozen=True)
class Observed:
    """Which queries of a step count, as the observe op takes it: int32 ``[requests]`` each."""

    first: Tensor
    fresh: Tensor


def observed(plan: TierPlan, policy: str, seq_lens: Tensor, query_lens: Tensor) -> Observed | None:
    """Which of a step's queries add to the masses; None if the policy reads none.

    Those that the score names are the last before each boundary, whatever the chunks of a prompt.
    The masses are set to 0 before the first of them.

    Args:
        plan: the tier.
        policy: the score.
        seq_lens: int32 ``[requests]``, tokens by position, those of this step included.
        query_lens: int32 ``[requests]``, tokens of this step.
    """
    if policy not in OBSERVED:
        return None
    starts = seq_lens - query_lens
    queries = OBSERVED[policy].queries
    if queries is None:
        never = torch.zeros_like(starts)
        return Observed(never, never)
    ends = torch.tensor([next_boundary(plan.interval, s) for s in starts.tolist()])
    window = (ends - min(queries, plan.interval)).to(starts.dtype)
    fresh = (starts <= window) & (window < seq_lens)
    return Observed((window - starts).clamp(min=0), fresh.to(starts.dtype))
