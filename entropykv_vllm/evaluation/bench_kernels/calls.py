# SPDX-License-Identifier: Apache-2.0
"""The kernels that are compared: calls that walk through the sets of pages of a pool by turns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from entropykv_vllm.evaluation.bench_kernels.pools import pool, tables
from entropykv_vllm.evaluation.bench_kernels.shapes import (
    VLLM_PAGES,
    Case,
    Format,
    Pages,
    Shape,
    bytes_read,
    pages,
    segment,
    sets,
)
from entropykv_vllm.evaluation.machine import vllm_isa


@dataclass
class Contender:
    """What is timed: `call(i)` runs on the pages of set `i`, of which there are few."""

    name: str
    call: Callable[[int], None]
    pool: Tensor
    bytes_read: int
    tokens: int


def attention(case: Case, megabytes: float, huge: bool) -> list[Contender]:
    """vLLM's kernel with each page size, and ours with each format."""
    return [
        *(theirs(case, page, megabytes, huge) for page in VLLM_PAGES),
        *(ours(case, kind, megabytes, huge) for kind in case.formats),
    ]


def queries(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, room for the output, and the first query of each sequence."""
    count = case.sequences * case.queries
    query = torch.randn(count, case.shape.query_heads, case.shape.size).to(torch.bfloat16)
    starts = torch.arange(case.sequences + 1, dtype=torch.int32) * case.queries
    return query, torch.empty_like(query), starts


def full(case: Case, value: int) -> Tensor:
    """The same number for each sequence."""
    return torch.full((case.sequences,), value, dtype=torch.int32)


def dealt(
    case: Case, kind: Format, each: Pages, megabytes: float, huge: bool
) -> tuple[Tensor, Tensor]:
    """A pool, and the tables of its sets."""
    set_bytes = case.sequences * each.total * case.shape.page_bytes(kind.page)
    table = tables(sets(megabytes, set_bytes), case.sequences, each.total)
    return pool(case.shape, kind, table, each.cold, huge), table


def ours(case: Case, kind: Format, megabytes: float, huge: bool) -> Contender:
    """Our attention over cold pages of a format."""
    held, (query, output, starts) = pages(case, kind), queries(case)
    cache, table = dealt(case, kind, held, megabytes, huge)
    cold, hot = full(case, held.cold), full(case, held.hot_tokens)
    scale = case.shape.size**-0.5

    def call(i: int) -> None:
        rows = table[i % len(table)]
        torch.ops.entropykv.attention(
            query, cache, output, starts, rows, cold, hot, kind.bits, scale, 0.0, None
        )

    tokens = case.sequences * case.queries
    return Contender(str(kind.bits), call, cache, bytes_read(case, kind), tokens)


def theirs(case: Case, page: int, megabytes: float, huge: bool) -> Contender:
    """vLLM's attention, as its CPU backend calls it; its plan of the work is made before."""
    from vllm import _custom_ops

    query, output, starts = queries(case)
    held = Pages(0, case.tokens, -(-case.tokens // page))
    cache, table = dealt(case, Format(16, page), held, megabytes, huge)
    keys, values = cache.view(len(cache), case.shape.heads, 2 * page, -1).chunk(2, dim=2)
    options = {
        "query": query,
        "key_cache": keys,
        "value_cache": values,
        "output": output,
        "query_start_loc": starts,
        "seq_lens": full(case, case.tokens),
        "scale": case.shape.size**-0.5,
        "causal": True,
        "alibi_slopes": None,
        "sliding_window": -1,
        "softcap": 0,
        "scheduler_metadata": _work(case, starts, page),
        "s_aux": None,
    }

    def call(i: int) -> None:
        _custom_ops.cpu_attention_with_kv_cache(block_table=table[i % len(table)], **options)

    tokens = case.sequences * case.queries
    return Contender(f"vllm-{page}", call, cache, case.total_bytes, tokens)


def _work(case: Case, starts: Tensor, page: int) -> Tensor:
    from vllm import _custom_ops, envs

    return _custom_ops.cpu_attn_get_scheduler_metadata(
        num_reqs=case.sequences,
        num_heads=case.shape.query_heads,
        num_kv_heads=case.shape.heads,
        head_dim=case.shape.size,
        seq_lens=full(case, case.tokens),
        dtype=torch.bfloat16,
        query_start_loc=starts,
        causal=True,
        sliding_window_size=-1,
        isa=vllm_isa(case.shape.size, page),
        enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
    )


def collapse(shape: Shape, kind: Format, tokens: int, megabytes: float, huge: bool) -> Contender:
    """A collapse by the policy `entropykv` of up to `tokens` tokens, to half of each segment."""
    hot, cold = segment(shape, kind)
    moves = max(1, tokens // (hot * kind.page))
    count = sets(megabytes, moves * (hot + cold) * shape.page_bytes(kind.page))
    table = tables(count, moves, hot + cold)
    cache = pool(shape, Format(16, kind.page), table, 0, huge)
    # Not in place, as the same hot pages are read again in later rounds.
    source, target = (part.contiguous() for part in table.long().split([hot, cold], -1))
    sinks = torch.zeros(moves, dtype=torch.int64)

    def call(i: int) -> None:
        pages = source[i % count], target[i % count], sinks
        torch.ops.entropykv.collapse(cache, *pages, "entropykv", "token", "head", 16, kind.bits)

    read = moves * hot * shape.page_bytes(kind.page)
    return Contender("collapse", call, cache, read, moves * hot * kind.page)
