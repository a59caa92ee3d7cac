# SPDX-License-Identifier: Apache-2.0
"""Seconds of calls on a device, with cold caches."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

Call = Callable[[], object]

#: Bytes that are written between calls: more than any GPU's cache.
FLUSH = 256 << 20


def seconds(call: Call, device: str, budget: float = 0.1, least: int = 5) -> float:
    """The median of the seconds of a call, after it has run a few times.

    Args:
        call: starts work on the device's current stream.
        device: "cuda"; elsewhere, to try things out, it is called once.
        budget: seconds of calls to go on for.
        least: how often to call at the least.
    """
    if not device.startswith("cuda"):
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    for _ in range(3):
        once = _on_gpu(call)
    count = max(least, min(200, int(budget / max(once, 1e-7))))
    return statistics.median(_on_gpu(call) for _ in range(count))


def _on_gpu(call: Call) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    _flush()
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def _flush() -> None:
    if not _FLUSHED:
        _FLUSHED.append(torch.empty(FLUSH, dtype=torch.uint8, device="cuda"))
    _FLUSHED[0].zero_()


_FLUSHED: list[torch.Tensor] = []


def graphed(call: Call, device: str) -> Call:
    """The call as a CUDA graph, so that what Python takes to start it does not count."""
    if not device.startswith("cuda"):
        return call
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def copy_bandwidth(device: str, size: int = 1 << 30) -> float:
    """Bytes a second, read and written, of a copy of a tensor."""
    source = torch.empty(size, dtype=torch.uint8, device=device).zero_()
    target = torch.empty_like(source)
    return 2 * size / seconds(lambda: target.copy_(source), device)
