# SPDX-License-Identifier: Apache-2.0
"""How fast this machine reads memory: the sum of a large tensor of float32, by torch."""

from __future__ import annotations

from typing import Any

import torch

from entropykv_vllm.evaluation.bench_kernels.pools import huge_share, memory
from entropykv_vllm.evaluation.timing import interleaved, summary


def read(megabytes: float, huge: bool, seconds: float) -> dict[str, Any]:
    """Sum a tensor again and again, in order: what no walk through shuffled pages should beat."""
    floats = memory(int(megabytes * 1e6) // 4 * 4, huge).view(torch.float32)
    floats.fill_(1.0)
    times = interleaved({"sum": lambda _: floats.sum().item()}, seconds, 5)["sum"]
    found = summary(times)
    return {**found, "bytes": floats.nbytes, "huge": huge_share(floats)}


def speed(found: dict[str, Any]) -> float:
    """Bytes a second at the median."""
    return found["bytes"] / found["median"]
