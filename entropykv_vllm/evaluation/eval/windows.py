# SPDX-License-Identifier: Apache-2.0
"""The newest tokens that a setting leaves whole in every layer."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

from entropykv_vllm.config.settings import EvictionConfig
from entropykv_vllm.evaluation import engines, pool
from entropykv_vllm.plan.capacity import capacity
from entropykv_vllm.plan.layer_windows import layer_windows
from entropykv_vllm.plan.tiers import make_tiers
from entropykv_vllm.serving.settings import page_size

# Old pages are made of pages of 16-bit numbers.
ITEM_BYTES = 2


def least(config: EvictionConfig, model: str) -> int:
    """Return the shortest window of all tiers, in tokens.

    Raises:
        ValueError: if the settings do not fit the model, in one sentence.
    """
    folder = engines.model_folder(model)
    page = page_size(config)
    fits = partial(capacity, pool.shape(folder).head_size, page, ITEM_BYTES)
    return min(tier.plan.window for tier in make_tiers(config, _full(folder), page, fits))


def _full(folder: str) -> list[int]:
    """The layers with full attention. Kinds that `plan` cannot count do not matter here."""
    config: dict[str, Any] = json.loads((Path(folder) / "config.json").read_text())
    kinds = config.get("layer_types")
    if kinds is None:
        windows = layer_windows(config, config["num_hidden_layers"])
        kinds = ["full_attention" if window is None else "" for window in windows]
    return [layer for layer, kind in enumerate(kinds) if kind == "full_attention"]
