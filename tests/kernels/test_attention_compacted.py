# SPDX-License-Identifier: Apache-2.0
"""vLLM's own kernel over a collapsed and compacted table attends to exactly the survivors."""

import pytest
import torch

from entropykv_vllm.attention.compact import compact
from entropykv_vllm.kernels.collapse import collapse
from entropykv_vllm.kernels.layout import read_pages
from entropykv_vllm.kernels.scores import SCORES

HEADS, QUERY_HEADS, BLOCK = 2, 6, 32
SEGMENT, KEPT, SINKS = 4, 2, 4
SCALE = 0.125
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
# Tokens before the step, tokens of the step, segments to collapse (the rest is hot).
REQUESTS = [(297, 1, 2), (150, 40, 1), (61, 3, 0), (0, 20, 0), (319, 1, 2)]


def fill_tables(kernels, caches, lens, isa):
    """Give each request its own pages, filled by vLLM's op; returns the block tables.

    The tail of a last page gets numbers too: the kernel multiplies masked values by 0, so NaN
    there would reach the output. vLLM's caches start as zeros.
    """
    tables = torch.zeros(len(lens), 16, dtype=torch.int32)
    for row, pages in zip(tables, (-(-n // BLOCK) for n in lens), strict=True):
        row[:pages] = tables.max() + 1 + torch.arange(pages)
    slots = (tables[tables > 0].long()[:, None] * BLOCK + torch.arange(BLOCK)).flatten()
    for cache in caches:
        tokens = torch.randn(2, len(slots), HEADS, cache.shape[-1] // 2).to(cache.dtype)
        kernels.write(cache, *tokens, slots, isa)
    return tables


def tokens_of(cache, row, count, isa):
    """Keys and values ``[heads, count, dim]`` of a request without holes."""
    sides = read_pages(cache, row[row > 0].long(), isa)
    return [side.transpose(0, 1).flatten(1, 2)[:, :count] for side in sides]


def collapse_all(caches, tables, score, isa):
    """Collapse the segments of all requests in one call; freed pages are overwritten with NaN."""
    moves = [(r, s * SEGMENT) for r, request in enumerate(REQUESTS) for s in range(request[2])]
    src = torch.stack([tables[r, at : at + SEGMENT] for r, at in moves]).long()
    sinks = [SINKS if at == 0 else 0 for _, at in moves]
    collapse(caches, src, src[:, :KEPT], score=score, sinks=sinks, isa=isa)
    for r, at in moves:
        tables[r, at + KEPT : at + SEGMENT] = 0
    for cache in caches:
        cache[src[:, KEPT:].flatten()] = torch.nan


def survivors(keys, values, segments, score):
    """The tokens ``[heads, left, dim]`` that stay, chosen head by head without pages."""
    kept = []
    for keys_of_head, values_of_head in zip(keys, values, strict=True):
        indices = []
        for start in range(0, segments * SEGMENT * BLOCK, SEGMENT * BLOCK):
            part = slice(start, start + SEGMENT * BLOCK)
            scores = score(keys_of_head[part], values_of_head[part])
            scores[: SINKS if start == 0 else 0] = torch.inf
            best = sorted(range(len(scores)), key=lambda i: -scores[i])[: KEPT * BLOCK]
            indices += sorted(start + i for i in best)
        indices += range(segments * SEGMENT * BLOCK, len(keys_of_head))
        kept.append((keys_of_head[indices], values_of_head[indices]))
    return (torch.stack(side) for side in zip(*kept, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_size", [64, 80])
@pytest.mark.parametrize("name", ["entropykv", "keydiff"])
def test_prefill_and_decode(cpu_kernels, plain_attention, dtype, head_size, name):
    torch.manual_seed(0)
    isa = "vec16" if head_size % 32 else "vec"
    cache = torch.full((64, HEADS, BLOCK, 2 * head_size), torch.nan, dtype=dtype)
    caches = [cache, cache.clone()]
    new = [new for _, new, _ in REQUESTS]
    lens = torch.tensor([old + new for old, new, _ in REQUESTS], dtype=torch.int32)
    tables = fill_tables(cpu_kernels, caches, lens.tolist(), isa)
    before = [[tokens_of(c, *row, isa) for row in zip(tables, lens, strict=True)] for c in caches]
    collapse_all(caches, tables, SCORES[name], isa)
    table, seq_lens = compact(tables, lens, BLOCK)

    for cache, histories in zip(caches, before, strict=True):
        query = torch.randn(sum(new), QUERY_HEADS, head_size).to(dtype)
        output = cpu_kernels.attend(query, cache, table, seq_lens, new, isa, SCALE)
        parts = zip(query.split(new), output.split(new), histories, REQUESTS, strict=True)
        for asked, answer, history, (_, _, segments) in parts:
            left = survivors(*history, segments, SCORES[name])
            expected = plain_attention(asked, *left, SCALE)
            tolerance = TOLERANCE[dtype]
            torch.testing.assert_close(answer.float(), expected, atol=tolerance, rtol=tolerance)
