# SPDX-License-Identifier: Apache-2.0
"""What tells the stored results of one model from those of another in a folder of the same name."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path

from entropykv_vllm.model.sources import SOURCES

KINDS = (".safetensors", ".bin", ".gguf")
#: Of each file of weights so many pieces of so many bytes are read, evenly spread over it.
PIECES, SIZE = 256, 1024


def marks(model: str) -> dict[str, str]:
    """Return what a specification must have besides a model's name or folder.

    Nothing for models that are fetched by name: those are always the same.
    """
    return {} if model in SOURCES else {"weights": weights(model)}


def folder(model: str) -> str:
    """Return the name of a folder for results of a model alone."""
    name = Path(model).resolve().name
    return name if model in SOURCES else f"{name}-{weights(model)[:8]}"


@lru_cache(maxsize=8)
def weights(model: str) -> str:
    """Return a hash of a folder's configuration and samples of its weights, 16 hex digits.

    Raises:
        OSError: if they cannot be read.
    """
    found = hashlib.sha256((Path(model) / "config.json").read_bytes())
    for path in sorted(Path(model).iterdir()):
        if path.suffix in KINDS:
            found.update(f"{path.name} {path.stat().st_size}".encode())
            _sample(path, found)
    return found.hexdigest()[:16]


def _sample(path: Path, found: hashlib._Hash) -> None:
    last = max(0, path.stat().st_size - SIZE)
    with path.open("rb") as file:
        for piece in range(PIECES):
            file.seek(last * piece // (PIECES - 1))
            found.update(file.read(SIZE))
