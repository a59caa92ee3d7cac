# SPDX-License-Identifier: Apache-2.0
"""One run of the kernel benchmark, in a process of its own. Run by `command`.

A run is all cases with one number of threads and one kind of memory pages.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from entropykv_vllm.evaluation import bandwidth, cells, machine
from entropykv_vllm.evaluation.bench_kernels.calls import Contender, attention, collapse, ours
from entropykv_vllm.evaluation.bench_kernels.pools import huge_share
from entropykv_vllm.evaluation.bench_kernels.shapes import (
    FORMATS,
    Case,
    Format,
    Shape,
    cases,
    segment,
)
from entropykv_vllm.evaluation.timing import interleaved, summary
from entropykv_vllm.kernels import native


def measured(contenders: list[Contender], spec: dict[str, Any]) -> dict[str, Any]:
    """Time contenders by turns."""
    calls = {each.name: each.call for each in contenders}
    times = interleaved(calls, spec["seconds"], spec["rounds"])
    return {
        each.name: {
            **summary(times[each.name]),
            "bytes": each.bytes_read,
            "pool_bytes": each.pool.nbytes,
            "huge": huge_share(each.pool),
        }
        for each in contenders
    }


def attention_case(case: Case, spec: dict[str, Any]) -> dict[str, Any]:
    """Time vLLM's kernel and ours, all formats."""
    contenders = attention(case, spec["megabytes"], spec["huge"])
    return {**case.values(), "kernels": measured(contenders, spec)}


def collapse_case(shape: Shape, kind: Format, spec: dict[str, Any]) -> dict[str, Any]:
    """Time a collapse, and by turns with it the attention that it is a share of."""
    case = Case("prefill", shape, 1, spec["collapse_context"], spec["queries"])
    reading = ours(case, FORMATS[0], spec["megabytes"], spec["huge"])
    writing = collapse(shape, kind, case.queries, spec["megabytes"], spec["huge"])
    return {
        "part": "collapse",
        "shape": str(shape),
        "bits": kind.bits,
        "segment": segment(shape, kind)[0] * kind.page,
        "tokens": writing.tokens,
        "queries": case.queries,
        "context": case.context,
        "kernels": measured([reading, writing], spec),
    }


def jobs(spec: dict[str, Any]) -> list[Callable[[], dict[str, Any]]]:
    """All measurements of the run."""
    todo: list[Any] = [partial(attention_case, case, spec) for case in cases(spec)[0]]
    if "collapse" in spec["parts"]:
        shapes = [Shape.parse(text) for text in spec["shapes"]]
        todo += [partial(collapse_case, shape, kind, spec) for shape in shapes for kind in FORMATS]
    return todo


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    """Measure all cases; the limit of the memory before and after them, as machines drift."""
    native.load()
    torch.manual_seed(0)
    todo = jobs(spec)
    load = [os.getloadavg()[0]]
    reads = [bandwidth.read(spec["read_megabytes"], spec["huge"], spec["seconds"])]
    results = []
    for job in todo:
        results.append(job())
        cells.report(len(results), len(todo))
    reads.append(bandwidth.read(spec["read_megabytes"], spec["huge"], spec["seconds"]))
    load.append(os.getloadavg()[0])
    return {
        "machine": machine.about(spec["shapes"]),
        "load": load,
        "reads": reads,
        "cases": results,
    }


if __name__ == "__main__":
    cells.main(measure)
