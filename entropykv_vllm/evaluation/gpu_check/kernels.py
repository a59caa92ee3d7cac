# SPDX-License-Identifier: Apache-2.0
"""The kernels there are here: Triton's, and CUDA's where they were built and can run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from entropykv_vllm.kernels import cuda
from entropykv_vllm.kernels.gpu import collapse, write


@dataclass(frozen=True)
class Kernels:
    """The ops that there are in both languages; see `kernels.gpu` for their arguments."""

    write: Callable[..., None]
    collapse: Callable[..., None]
    drop: Callable[..., None]


def found(device: str) -> dict[str, Kernels]:
    """name -> kernels that run on a device."""
    kinds = {"triton": Kernels(write.write, collapse.collapse, collapse.drop)}
    if device.startswith("cuda") and cuda.load():
        kinds["cuda"] = Kernels(cuda.write, cuda.collapse, cuda.drop)
    return kinds
