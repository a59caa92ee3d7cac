# SPDX-License-Identifier: Apache-2.0
"""The best settings as files that `vllm serve` takes, and the commands that take them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from entropykv_vllm.evaluation import engines
from entropykv_vllm.evaluation.calibration import profile
from entropykv_vllm.evaluation.calibration.run import Summary


@dataclass(frozen=True)
class Files:
    """Where the settings lie: for `--kv-eviction-config`, and the whole server for `--config`."""

    model: str
    settings: Path
    server: Path


def write(out: Path, config: Any, model: str, winner: Summary) -> Files:
    """Write both files.

    Args:
        out: the folder.
        config: the model's configuration, as transformers has it.
        model: its name or folder.
        winner: the settings.
    """
    folder = str(Path(engines.model_folder(model)).resolve())
    found = Files(folder, out / "settings.json", out / "serve.yaml")
    values = winner.cell.config().model_dump(mode="json", exclude_none=True)
    profile.write(found.settings, config, Path(model).name, {}, values)
    server = {
        "model": folder,
        "kv-cache-dtype": "bfloat16",
        "kv-eviction": winner.cell.policy,
        "kv-eviction-config": str(found.settings.resolve()),
    }
    head = f"# {winner.cell.name}. To serve: vllm serve --config {found.server}\n"
    found.server.write_text(head + yaml.safe_dump(server, sort_keys=False))
    return found


def advice(winner: Summary | None, files: Files | None) -> str:
    """Say which settings are best, and how to serve with them."""
    if winner is None or files is None:
        return "nothing reaches the target: keep the full cache, or take the preset quality"
    less = f"{1 / winner.held:.1f} times less than a full 16-bit cache"
    return (
        f"best: {winner.cell.name}, {less}\n\n{profile.command(files.settings, files.model)}\n\n"
        f"or all of it in one file:\n\nvllm serve --config {files.server}"
    )
