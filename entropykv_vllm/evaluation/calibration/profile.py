# SPDX-License-Identifier: Apache-2.0
"""The file that a calibration leaves: settings for one model, and what they were made from."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from entropykv_vllm.config.profile import fingerprint


def write(
    path: Path,
    config: Any,
    name: str,
    sensitivity: Mapping[int, float],
    settings: Mapping[str, Any],
) -> None:
    """Write a profile, in one rename.

    Args:
        path: the file, JSON, as `--kv-eviction-config` takes it.
        config: the model's configuration.
        name: the model's name, for people.
        sensitivity: of each full-attention layer.
        settings: as `EvictionConfig` has them; `tiers` if not all layers are alike.
    """
    profile = {
        "model": fingerprint(config),
        "name": name,
        "sensitivity": {str(layer): round(value, 4) for layer, value in sensitivity.items()},
    }
    values = {"profile": profile, **settings}
    if "tiers" in settings:
        values["tiers"] = [_short(tier) for tier in settings["tiers"]]
    part = path.with_suffix(".part")
    path.parent.mkdir(parents=True, exist_ok=True)
    part.write_text(json.dumps(values, indent=1) + "\n")
    part.replace(path)


def command(path: Path, model: str = "MODEL") -> str:
    """Return the command that serves with a profile, with hot pages as it was measured with."""
    return (
        f"vllm serve {shlex.quote(model)} --kv-cache-dtype bfloat16 --kv-eviction entropykv \\\n"
        f"    --kv-eviction-config {shlex.quote(str(path))}"
    )


def _short(tier: Mapping[str, Any]) -> dict[str, Any]:
    from entropykv_vllm.plan.tiers import ranges

    return {**tier, "layers": ranges(tier["layers"])}
