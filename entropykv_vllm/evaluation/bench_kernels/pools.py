# SPDX-License-Identifier: Apache-2.0
"""Pools of pages on the memory pages that a measurement asks for, full of plausible numbers."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from entropykv_vllm.evaluation.bench_kernels.shapes import Format, Shape, cold_tokens
from entropykv_vllm.kernels import formats, hugepages

# Different pages; what is in them does not matter to memory, so the rest are copies.
TEMPLATES = 8


def memory(size: int, huge: bool) -> Tensor:
    """Return untouched memory, uint8 `[size]`, with huge pages or surely without."""
    # Not torch.empty: memory that an allocator had handed out before may still lie in huge pages.
    area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    tensor = torch.frombuffer(area, dtype=torch.uint8)
    if huge:
        hugepages.advise(tensor)
    else:
        area.madvise(mmap.MADV_NOHUGEPAGE)
    return tensor


def pool(shape: Shape, kind: Format, table: Tensor, cold: int, huge: bool) -> Tensor:
    """Return pages of normally distributed keys and values.

    Args:
        shape: heads of the layer.
        kind: the format of cold pages.
        table: integers `[..., pages of a sequence]`, every page of the pool once.
        cold: how many pages of a sequence, the first ones, are cold.
        huge: whether to ask for huge pages.

    Returns:
        bfloat16 `[pages, heads, page, 2 * head size]`.
    """
    pages, like = table.numel(), (shape.heads, kind.page, 2 * shape.size)
    cache = memory(pages * shape.page_bytes(kind.page), huge).view(torch.bfloat16)
    cache = cache.view(pages, *like)
    template = torch.randn(TEMPLATES, *like).to(torch.bfloat16)
    _fill(cache, table[..., cold:], template)
    if kind.bits != 16:
        _quantize(template, shape, kind)
    _fill(cache, table[..., :cold], template)
    return cache


def _quantize(template: Tensor, shape: Shape, kind: Format) -> None:
    size = (TEMPLATES, shape.heads, cold_tokens(shape, kind), shape.size)
    where = torch.arange(TEMPLATES)
    formats.write_cold(template, where, torch.randn(size), torch.randn(size), kind.bits)


def _fill(cache: Tensor, pages: Tensor, template: Tensor) -> None:
    for some in pages.flatten().long().split(TEMPLATES):
        cache.index_copy_(0, some, template[: len(some)])


def tables(*size: int) -> Tensor:
    """Deal the pages of a pool out, shuffled and each once: int32 `[sets, rows, pages]`."""
    return torch.randperm(math.prod(size)).to(torch.int32).view(size)


def huge_share(tensor: Tensor) -> float:
    """Return how much of the resident memory under a tensor lies in huge pages, 0 to 1."""
    start = tensor.data_ptr()
    lines = Path("/proc/self/smaps").read_text().splitlines()
    return share_of_range(lines, start, start + tensor.nbytes)


def share_of_range(lines: Iterable[str], start: int, end: int) -> float:
    """Read that share for a range of addresses from the lines of `/proc/self/smaps`.

    Linux joins neighbours of one kind, so the share is that of all areas that touch the range.
    """
    inside, kilobytes = False, {"Rss:": 0, "AnonHugePages:": 0}
    for line in lines:
        name, *rest = line.split()
        if not name.endswith(":"):
            low, high = (int(x, 16) for x in name.split("-"))
            inside = low < end and start < high
        elif inside and name in kilobytes:
            kilobytes[name] += int(rest[0])
    return kilobytes["AnonHugePages:"] / kilobytes["Rss:"] if kilobytes["Rss:"] else 0.0
