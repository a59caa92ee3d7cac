# SPDX-License-Identifier: Apache-2.0
"""The kernels there are here: Triton's, and CUDA's where they were built and can run."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from entropykv_vllm.kernels import gpu


def found(device: str) -> dict[str, Any]:
    """name -> a module with `write`, `collapse` and `drop`."""
    kinds: dict[str, Any] = {"triton": gpu}
    if device.startswith("cuda") and (cuda := _cuda()):
        kinds["cuda"] = cuda
    return kinds


def _cuda() -> ModuleType | None:
    from entropykv_vllm.kernels import cuda

    return cuda if cuda.load() else None
