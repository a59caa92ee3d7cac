# SPDX-License-Identifier: Apache-2.0
"""The presets, as the settings of cells."""

from __future__ import annotations

from typing import Any

from entropykv_vllm.config.presets import PRESETS as PRESETS
from entropykv_vllm.errors import UsageError


def chosen(names: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return `preset -> (policy, eviction settings)` of a list such as `quality,max`.

    Raises:
        UsageError: if a name is not a preset.
    """
    wanted = [name for name in names.split(",") if name]
    for name in wanted:
        if name not in PRESETS:
            raise UsageError(f"'{name}' is not a preset: choose of {', '.join(PRESETS)}")
    return {name: (PRESETS[name], {"preset": name}) for name in wanted}
