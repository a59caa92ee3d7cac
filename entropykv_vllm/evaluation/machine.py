# SPDX-License-Identifier: Apache-2.0
"""What a measurement ran on."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

# Processor flags, as Linux writes them, that decide which kernels run.
FLAGS = ("f16c", "fma", "avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16")


def processor(cpuinfo: str) -> dict[str, Any]:
    """Read the model, and the flags that matter here, from the text of `/proc/cpuinfo`."""
    lines = (line.partition(":") for line in cpuinfo.splitlines())
    values = {name.strip(): value.strip() for name, _, value in lines}
    flags = values.get("flags", "").split()
    model = values.get("model name", platform.processor() or platform.machine())
    return {"cpu": model, "flags": [flag for flag in FLAGS if flag in flags]}


def last_level_cache() -> int:
    """Bytes of the largest cache that Linux tells of, 0 if of none."""
    sizes = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    texts = [path.read_text().strip() for path in sizes]
    return max((int(t[:-1]) * units[t[-1]] for t in texts if t[-1:] in units), default=0)


def vllm_isa(size: int, page: int) -> str:
    """The instruction set that vLLM's CPU backend would choose."""
    import torch
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    return _get_attn_isa(torch.bfloat16, page, size, "auto")


def about(shapes: list[str]) -> dict[str, Any]:
    """Describe this machine and what is installed, for the record of a kernel benchmark."""
    import torch
    import vllm

    from entropykv_vllm.evaluation.bench_kernels.shapes import VLLM_PAGES, Shape
    from entropykv_vllm.kernels import native

    sizes = {Shape.parse(shape).size for shape in shapes}
    return {
        **processor(Path("/proc/cpuinfo").read_text()),
        "cores": os.cpu_count(),
        "last level cache": last_level_cache(),
        "kernel": platform.release(),
        "torch threads": torch.get_num_threads(),
        "isa": native.isa(),
        "vllm isa": {f"{n}, page {p}": vllm_isa(n, p) for n in sorted(sizes) for p in VLLM_PAGES},
        "torch": torch.__version__,
        "vllm": vllm.__version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
