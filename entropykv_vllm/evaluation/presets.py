# SPDX-License-Identifier: Apache-2.0
"""The presets, as the settings of cells."""

from __future__ import annotations

from typing import Any

# name of a preset -> the policy that it is made for, from much memory to little
PRESETS = {
    "quality": "entropykv",
    "balanced": "entropykv",
    "long-context": "entropykv",
    "extreme": "entropykv",
    "max": "entropykv",
    "streaming": "sink",
}


def chosen(names: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return `preset -> (policy, eviction settings)` of a list such as `quality,max`.

    Raises:
        SystemExit: if a name is not a preset.
    """
    wanted = [name for name in names.split(",") if name]
    for name in wanted:
        if name not in PRESETS:
            raise SystemExit(f"'{name}' is not a preset: choose of {', '.join(PRESETS)}")
    return {name: (PRESETS[name], {"preset": name}) for name in wanted}
