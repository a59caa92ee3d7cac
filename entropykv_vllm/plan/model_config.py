# SPDX-License-Identifier: Apache-2.0
"""Where the `config.json` of a model is: on this disk, among those shipped, or on the hub."""

from __future__ import annotations

import difflib
import json
import os
from importlib import resources
from pathlib import Path
from typing import Any

#: Seconds to wait for the hub.
_PATIENCE = 5


def find_model(model: str) -> tuple[str, dict[str, Any]]:
    """Return the name of a model and its `config.json`.

    Args:
        model: a folder or a file, or a name such as `Qwen/Qwen2.5-7B-Instruct`, which is looked
            up in the cache of the hub on this disk, then among the models shipped with the
            package (where the organisation may be left out), then on the hub.

    Raises:
        ValueError: one sentence that says what to do.
    """
    try:
        path = _on_disk(model)
    except (OSError, RuntimeError) as error:  # too long, a closed folder, the home of nobody
        why = getattr(error, "strerror", None) or error
        raise ValueError(f"'{model[:100]}' cannot be looked for on this disk: {why}") from None
    if path is not None:
        return model, _read(path)
    shipped = known_models()
    name = _shipped_name(model, shipped)
    return (name, shipped[name]) if name else (model, _read(_fetch(model)))


def _on_disk(model: str) -> Path | None:
    """The config.json of a folder, a file, or a model in the hub's cache, if there is one."""
    path = Path(model).expanduser()
    if model and path.exists():
        return path / "config.json" if path.is_dir() else path
    if not model or path.is_absolute() or model.startswith((".", "~")) or model.endswith(".json"):
        raise ValueError(f"there is no '{model}': give a model's folder, its config.json or name")
    return _cached(model)


def known_models() -> dict[str, dict[str, Any]]:
    """The numbers of the models that come with the package, by name."""
    file = resources.files("entropykv_vllm.plan") / "known_models.json"
    models: dict[str, dict[str, Any]] = json.loads(file.read_text())
    return models


def _read(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(
            f"there is no {path.name} in '{path.parent}': give the folder of a model"
        ) from None
    except (OSError, ValueError, RecursionError):
        raise ValueError(f"'{path}' is not a config.json that can be read") from None
    if not isinstance(config, dict):
        raise ValueError(f"'{path}' is not the config.json of a model")
    return config


def _shipped_name(model: str, shipped: dict[str, Any]) -> str | None:
    """The shipped model of this name, in any case, with or without its organisation."""
    for name in shipped:
        if model.lower() in (name.lower(), name.lower().rpartition("/")[2]):
            return name
    return None


def _cached(model: str) -> Path | None:
    """The config.json of the newest snapshot in the hub's cache on this disk, if there is one."""
    folder = _hub_cache() / f"models--{model.replace('/', '--')}"
    main = folder / "refs" / "main"
    if main.is_file():
        path = folder / "snapshots" / main.read_text().strip() / "config.json"
        if path.exists():
            return path
    found = sorted(folder.glob("snapshots/*/config.json"), key=lambda path: path.stat().st_mtime)
    return found[-1] if found else None


def _hub_cache() -> Path:
    if "HF_HUB_CACHE" in os.environ:
        return Path(os.environ["HF_HUB_CACHE"]).expanduser()
    home = os.environ.get("HF_HOME")
    base = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    return Path(home or Path(base) / "huggingface").expanduser() / "hub"


def _fetch(model: str) -> Path:
    """Fetch the config.json, and nothing else, from the hub."""
    try:
        from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url
        from huggingface_hub.utils import disable_progress_bars, logging
    except ImportError as error:
        raise ValueError(_unknown(model, error)) from None
    logging.set_verbosity_error()
    disable_progress_bars()
    try:
        # Asked first, since it does not try again and again where there is no network.
        get_hf_file_metadata(hf_hub_url(model, "config.json"), timeout=_PATIENCE)
        return Path(hf_hub_download(model, "config.json"))
    except Exception as error:  # of the hub, of the network, of the disk: no class has them all
        raise ValueError(_unknown(model, error)) from None


def _nearest(model: str) -> str | None:
    """The shipped model that may be meant: one whose name begins so, else one that is alike."""
    names = {name.lower().rpartition("/")[2]: name for name in known_models()}
    wanted = model.lower().rpartition("/")[2]
    longer = [name for name in names if wanted and name.startswith(wanted)]
    close = longer or difflib.get_close_matches(wanted, names, n=1, cutoff=0.7)
    return names[close[0]] if close else None


def _unknown(model: str, error: Exception) -> str:
    close = _nearest(model)
    guess = f" (did you mean {close}?)" if close else ""
    return (
        f"'{model}' is not on this disk, not among the models shipped, and could not be fetched "
        f"({type(error).__name__}){guess}: give the folder with its config.json as --model, or its "
        "numbers as --layers, --heads, --kv-heads, --head-size, --hidden-size, "
        "--intermediate-size and --vocab-size"
    )
