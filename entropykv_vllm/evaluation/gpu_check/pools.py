# SPDX-License-Identifier: Apache-2.0
"""Caches and requests on a device, as the ops take them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from entropykv_vllm.kernels import reference
from entropykv_vllm.kernels.formats import cold_capacity, page_bytes, write_cold
from entropykv_vllm.plan.capacity import capacity, quantized_bytes


@dataclass(frozen=True)
class Shape:
    """Heads of a layer, and tokens of a hot page."""

    heads: int
    kv_heads: int
    head_size: int
    page: int

    def __str__(self) -> str:
        return f"{self.heads}/{self.kv_heads}/{self.head_size}"

    def cold_tokens(self, item_bytes: int, bits: int) -> int:
        """Tokens of a cold page."""
        return capacity(self.head_size, self.page, item_bytes, bits)

    def cold_bytes(self, item_bytes: int, bits: int) -> int:
        """Bytes of all heads of a cold page that mean something."""
        if bits == 16:
            return self.kv_heads * 2 * self.head_size * self.page * item_bytes
        tokens = self.cold_tokens(item_bytes, bits)
        return self.kv_heads * quantized_bytes(tokens, self.head_size, bits)


@dataclass(frozen=True)
class Requests:
    """The arguments of the attention op, but its output."""

    query: Tensor
    cache: Tensor
    starts: Tensor
    table: Tensor
    cold: Tensor
    hot: Tensor
    bits: int
    scale: float
    softcap: float = 0.0
    sinks: Tensor | None = None

    @property
    def arguments(self) -> tuple[Any, ...]:
        """What comes after the output."""
        batch = self.starts, self.table, self.cold, self.hot, self.bits
        return (*batch, self.scale, self.softcap, self.sinks)

    @property
    def most_queries(self) -> int:
        return int(self.starts.diff().max())

    def to(self, device: str) -> Requests:
        """The same on a device."""
        moved = {k: v.to(device) for k, v in vars(self).items() if torch.is_tensor(v)}
        return replace(self, **moved)


def random_requests(
    shape: Shape,
    dtype: torch.dtype,
    bits: int,
    lengths: list[tuple[int, int, int]],
    softcap: float = 0.0,
    with_sinks: bool = False,
) -> Requests:
    """Requests on the CPU, with NaN wherever nothing may be read.

    Args:
        shape: of the layer.
        dtype: of the cache and the queries.
        bits: of the cold pages.
        lengths: cold pages, hot tokens and new tokens of each request.
        softcap: of the logits.
        with_sinks: whether each query head has a logit of its own.
    """
    held = [cold + -(-hot // shape.page) for cold, hot, _ in lengths]
    cache = torch.full(
        (sum(held) + 1, shape.kv_heads, shape.page, 2 * shape.head_size), torch.nan, dtype=dtype
    )
    pages = 1 + torch.randperm(sum(held))
    table = torch.zeros(len(held), max(held) + 2, dtype=torch.int32)
    for row, own, (cold, hot, _) in zip(table, pages.split(held), lengths, strict=True):
        row[: len(own)] = own
        _fill(cache, own, cold, hot, bits)
    new = torch.tensor([0] + [n for _, _, n in lengths], dtype=torch.int32)
    counts = torch.tensor(lengths, dtype=torch.int32)
    return Requests(
        query=torch.randn(int(new.sum()), shape.heads, shape.head_size).to(dtype),
        cache=cache,
        starts=new.cumsum(0, dtype=torch.int32),
        table=table,
        cold=counts[:, 0].contiguous(),
        hot=counts[:, 1].contiguous(),
        bits=bits,
        scale=shape.head_size**-0.5,
        softcap=softcap,
        sinks=torch.randn(shape.heads) if with_sinks else None,
    )


def _fill(cache: Tensor, pages: Tensor, cold: int, hot: int, bits: int) -> None:
    heads, page, width = cache.shape[1:]
    keys, values = torch.randn(2, cold, heads, cold_capacity(cache, bits), width // 2)
    write_cold(cache, pages[:cold], keys, values, bits, "rows")
    keys, values = torch.randn(2, hot, heads, width // 2)
    slots = (pages[cold:, None] * page + torch.arange(page)).flatten()[:hot]
    reference.write(keys, values, cache, slots, "rows")


def full_requests(
    shape: Shape, bits: int, requests: int, tokens: int, window: int, device: str, queries: int = 1
) -> Requests:
    """Requests that hold about `tokens` tokens each, `window` and more of them hot, for timing.

    The pages are bytes that make small numbers in every format; they lie in any order.
    """
    per_page = shape.cold_tokens(2, bits)
    cold = max(0, tokens - window) // per_page
    hot = tokens - cold * per_page
    each = cold + -(-hot // shape.page)
    cache = torch.empty(
        requests * each, shape.kv_heads, shape.page, 2 * shape.head_size,
        dtype=torch.bfloat16, device=device,
    )  # fmt: skip
    page_bytes(cache).random_(0x30, 0x3D)
    order = torch.randperm(requests * each, device=device)
    counts = {"dtype": torch.int32, "device": device}
    query = torch.randn(requests * queries, shape.heads, shape.head_size, device=device)
    return Requests(
        query=query.to(torch.bfloat16),
        cache=cache,
        starts=torch.arange(requests + 1, **counts) * queries,
        table=order.view(requests, each).to(torch.int32),
        cold=torch.full((requests,), cold, **counts),
        hot=torch.full((requests,), hot, **counts),
        bits=bits,
        scale=shape.head_size**-0.5,
    )


def bytes_read(requests: Requests, shape: Shape) -> int:
    """The bytes of keys and values that attention must read."""
    cold = int(requests.cold.sum()) * shape.cold_bytes(2, requests.bits)
    hot = int(requests.hot.sum()) * shape.kv_heads * 2 * shape.head_size * 2
    return cold + hot
