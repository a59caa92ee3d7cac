# SPDX-License-Identifier: Apache-2.0
"""A cell: settings under which the same texts are answered, and what they mean for a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from entropykv_vllm.config.settings import EvictionConfig, load
from entropykv_vllm.evaluation import engines
from entropykv_vllm.evaluation.offline.model import Model
from entropykv_vllm.plan.capacity import capacity
from entropykv_vllm.plan.schedule import TierPlan, boundary, held_pages
from entropykv_vllm.plan.tiers import make_tiers
from entropykv_vllm.serving.settings import page_size


@dataclass(frozen=True)
class Cell:
    """One column of a comparison: `eviction` are settings as `engine_args` takes them.

    The policy "none" is the full cache. `score` names a score of `offline.variants`, in place of
    the policy's own.
    """

    name: str
    policy: str
    eviction: Mapping[str, Any] = field(default_factory=dict)
    score: str | None = None

    def config(self, interval: int | None = None) -> EvictionConfig:
        """The validated settings; `interval` is set over those of the cell."""
        if self.policy == "none":
            return EvictionConfig.model_validate({"keep": 1.0, "bits": 16})
        base = {} if "preset" in self.eviction else engines.BASE
        more = {} if interval is None else {"interval": interval}
        return load(self.policy, {**base, **self.eviction, **more})


@dataclass(frozen=True)
class Layout:
    """What a cell's settings mean: tokens of a hot page, and the plan of each full layer."""

    cell: Cell
    config: EvictionConfig
    page: int
    plans: tuple[TierPlan, ...]

    def held(self, tokens: int, item_bytes: int) -> float:
        """Bytes of the pages that a request of `tokens` tokens holds, over those of a 16-bit cache.

        Of the layers with full attention.
        """
        pages = [held_pages(plan, boundary(plan, tokens), tokens) for plan in self.plans]
        return sum(pages) * self.page * item_bytes / (2 * tokens * len(self.plans))


def layout(cell: Cell, model: Model, dtype: torch.dtype, interval: int | None = None) -> Layout:
    """Plan a cell for a model whose cache has the numbers of `dtype`.

    Raises:
        ValueError: if the settings do not fit, in words.
    """
    config = cell.config(interval)
    page = page_size(config)
    fits = partial(capacity, model.head_size, page, dtype.itemsize)
    tiers = make_tiers(config, model.full, page, fits)
    plan_of = {layer: tier.plan for tier in tiers for layer in tier.layers}
    return Layout(cell, config, page, tuple(plan_of[layer] for layer in model.full))
