# SPDX-License-Identifier: Apache-2.0
"""One cell of the cost of scores: one way to make them, at one length. Run by `command`.

Each way starts from the queries and keys of one layer in float32 and ends with the scores of a
causal prompt, or with the tokens that they choose.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from entropykv_vllm.evaluation import cells, resident
from entropykv_vllm.evaluation.timing import summary
from entropykv_vllm.kernels import ops

PAGE = 32
STEP = 512  # of a prompt, as the scheduler cuts it at boundaries; a segment too
WARM_UP = STEP
SECONDS = 1.0  # calls go on for as long


def matrix(query: Tensor, keys: Tensor) -> Tensor:
    """Masses from the whole matrix of attention, as eager implementations make it.

    In place where it can be, so that two matrices at most are held at once.

    Args:
        query: float32 `[tokens, query_heads, head_size]`.
        keys: float32 `[tokens, kv_heads, head_size]`.

    Returns:
        float32 `[kv_heads, tokens]`.
    """
    tokens, heads, size = keys.shape
    groups = query.transpose(0, 1).unflatten(0, (heads, -1))
    logits = groups @ keys.permute(1, 2, 0)[:, None]
    future = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    logits.mul_(size**-0.5).masked_fill_(future, -torch.inf)
    return logits.softmax(-1).sum(-2).mean(1)


def side_table(query: Tensor, cache: Tensor) -> Tensor:
    """The same masses `[pages, kv_heads, slots]`, added up step by step beside the pages."""
    pages, heads, page, width = cache.shape
    mass = torch.zeros(pages, heads, page)
    table = torch.arange(pages, dtype=torch.int32)[None]
    for start in range(0, len(query), STEP):
        part = query[start : start + STEP]
        starts, hot = _numbers(0, len(part)), _numbers(start + len(part))
        rest = (16, (width // 2) ** -0.5, 0.0, None, _numbers(0), _numbers(0))
        ops.observe(part, cache, mass, starts, table, _numbers(0), hot, *rest)
    return mass


def attention_free(cache: Tensor) -> None:
    """Segment by segment, keep the better half by the default score, in place."""
    pages = torch.arange(len(cache)).view(-1, STEP // PAGE)
    half = pages[:, : STEP // PAGE // 2].contiguous()
    sinks = torch.zeros(len(pages), dtype=torch.int64)
    ops.collapse(cache, pages, half, sinks, "entropykv", "token", "head", 16, 16)


def _numbers(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def pages_of(keys: Tensor, values: Tensor) -> Tensor:
    """A layer's pages that hold these tokens, `[pages, kv_heads, PAGE, 2 * head_size]`."""
    tokens, heads, size = keys.shape
    cache = torch.zeros(-(-tokens // PAGE), heads, PAGE, 2 * size)
    ops.write(keys, values, cache, torch.arange(tokens))
    return cache


def work(spec: dict[str, Any], tokens: int) -> Callable[[], object]:
    """Return the call that is measured."""
    query_heads, heads, size = spec["shape"]
    query = torch.randn(tokens, query_heads, size)
    keys, values = torch.randn(2, tokens, heads, size)
    if spec["way"] == "matrix":
        return lambda: matrix(query, keys)
    cache = pages_of(keys, values)
    if spec["way"] == "table":
        return lambda: side_table(query, cache)
    return lambda: attention_free(cache)


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    """Measure the growth of memory in the first call, then time it and more."""
    torch.manual_seed(0)
    work(spec, WARM_UP)()  # what libraries set up once
    call, walls, busy = work(spec, spec["tokens"]), [], []

    def timed() -> None:
        wall, processor = time.perf_counter(), time.process_time()
        call()
        walls.append(time.perf_counter() - wall)
        busy.append(time.process_time() - processor)

    growth = resident.growth(timed)
    while sum(walls) < SECONDS:
        timed()
    return {
        "bytes": growth,
        "seconds": summary(walls),
        "processor seconds": summary(busy),  # hardly changed by other processes
        "threads": torch.get_num_threads(),
    }


if __name__ == "__main__":
    cells.main(measure)
