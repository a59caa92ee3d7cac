# SPDX-License-Identifier: Apache-2.0
"""How fast the kernels are: beside what torch has for the same tokens, and the memory's limit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from entropykv_vllm.evaluation.gpu_check.clock import Call, graphed, seconds
from entropykv_vllm.evaluation.gpu_check.pools import Requests, Shape, bytes_read, full_requests
from entropykv_vllm.kernels.formats import page_bytes
from entropykv_vllm.kernels.gpu.attention import attention

#: Tokens that are hot at the least, in every request.
WINDOW = 256
BITS = (16, 8, 4)

Row = dict[str, Any]


def decode(shape: Shape, requests: int, tokens: int, device: str, bandwidth: float) -> Row:
    """Attention of one new token a request, and beside it `_baseline`'s.

    A format for which the memory is too small is left out.
    """
    row: Row = {"shape": str(shape), "requests": requests, "tokens": tokens}
    row |= _baseline(shape, requests, tokens, 1, device)
    for bits in BITS:
        size = shape, bits, requests, tokens
        if found := _within(_decode, *size, device, bandwidth):
            row[f"{bits} bits"] = found
    return row


def _decode(
    shape: Shape, bits: int, requests: int, tokens: int, device: str, bandwidth: float
) -> Row:
    held = full_requests(shape, bits, requests, tokens, WINDOW, device)
    spent = seconds(graphed(_ours(held), device), device)
    return {"seconds": spent, "of limit": bytes_read(held, shape) / bandwidth / spent}


def prefill(shape: Shape, tokens: int, queries: int, device: str) -> Row:
    """Attention of the last tokens of one prompt; as `decode`."""
    row: Row = {"shape": str(shape), "requests": 1, "tokens": tokens, "queries": queries}
    row |= _baseline(shape, 1, tokens, queries, device)
    for bits in BITS:
        if found := _within(_prefill, shape, bits, tokens, queries, device):
            row[f"{bits} bits"] = found
    return row


def _prefill(shape: Shape, bits: int, tokens: int, queries: int, device: str) -> Row:
    held = full_requests(shape, bits, 1, tokens, queries + WINDOW, device, queries)
    return {"seconds": seconds(_ours(held), device)}


def _baseline(shape: Shape, requests: int, tokens: int, queries: int, device: str) -> Row:
    """``baseline``: seconds by name, None where the memory is too small for the tokens.

    ``baseline failed``: why others did not run, by name; not there if none failed.
    """
    found = _within(_dense, shape, requests, tokens, queries, device)
    if found is None:
        return {"baseline": None}
    calls, failed = found
    row: Row = {"baseline": {name: seconds(call, device) for name, call in calls.items()}}
    return row | ({"baseline failed": failed} if failed else {})


def _within(make: Callable[..., Any], *arguments: Any) -> Any:
    """What is made, or None if the device's memory is too small."""
    try:
        return make(*arguments)
    except torch.cuda.OutOfMemoryError:
        torch.cuda.empty_cache()
        return None


def _ours(held: Requests) -> Call:
    output, most = torch.empty_like(held.query), held.most_queries

    def call() -> None:
        attention(held.query, held.cache, output, *held.arguments, longest=most)

    return call


def _dense(
    shape: Shape, requests: int, tokens: int, queries: int, device: str
) -> tuple[dict[str, Call], dict[str, str]]:
    """Calls over the same tokens, dense and in bfloat16, which is more than a server could have.

    Returns:
        Those that run, and why the others do not, by name.
    """
    half: dict[str, Any] = {"dtype": torch.bfloat16, "device": device}
    size = requests, shape.kv_heads, tokens, shape.head_size
    keys, values = (torch.randn(size, **half) for _ in range(2))
    query = torch.randn(requests, shape.heads, queries, shape.head_size, **half)
    calls = (
        _torch_decode(query, keys, values) if queries == 1 else _torch_prefill(query, keys, values)
    )
    calls |= _libraries(query, keys, values)
    found, failed = {}, {}
    for name, call in calls.items():
        try:
            call()
            found[name] = graphed(call, device) if queries == 1 else call
        except (RuntimeError, ValueError, NotImplementedError) as error:
            failed[name] = (str(error) or type(error).__name__).splitlines()[0]
            print(f"  {name} does not run here: {failed[name]}")
    return found, failed


def _torch_decode(query: Tensor, keys: Tensor, values: Tensor) -> dict[str, Call]:
    """As it is, and with the heads that share keys as so many queries: keys are read once."""
    attend = F.scaled_dot_product_attention
    grouped = query.view(*keys.shape[:2], -1, keys.shape[3])
    return {
        "sdpa": lambda: attend(query, keys, values, enable_gqa=True),
        "sdpa, grouped": lambda: attend(grouped, keys, values),
    }


def _torch_prefill(query: Tensor, keys: Tensor, values: Tensor) -> dict[str, Call]:
    """Causal at the end of the keys, which every query head has a copy of."""
    from torch.nn.attention.bias import causal_lower_right

    group = query.shape[1] // keys.shape[1]
    mask = causal_lower_right(query.shape[2], keys.shape[2])
    keys, values = (x.repeat_interleave(group, 1) for x in (keys, values))
    return {"sdpa": lambda: F.scaled_dot_product_attention(query, keys, values, attn_mask=mask)}


def _libraries(query: Tensor, keys: Tensor, values: Tensor) -> dict[str, Call]:
    """FlashAttention and xformers, where they are installed."""
    calls: dict[str, Call] = {}
    by_token = [x.transpose(1, 2) for x in (query, keys, values)]
    try:
        from flash_attn import flash_attn_with_kvcache

        calls["flash_attn"] = lambda: flash_attn_with_kvcache(*by_token, causal=True)
    except ImportError:
        pass
    if query.shape[2] > 1:
        return calls
    try:
        from xformers.ops import fmha

        group = query.shape[1] // keys.shape[1]
        q = by_token[0].unflatten(2, (-1, group))
        k, v = (x[:, :, :, None].expand(-1, -1, -1, group, -1) for x in by_token[1:])
        op = (fmha.triton_splitk.FwOp, None)
        calls["xformers split-k"] = lambda: fmha.memory_efficient_attention_forward(
            q, k, v, op=op[0]
        )
    except (ImportError, AttributeError):
        pass
    return calls


def collapses(
    shape: Shape, kinds: dict[str, Any], device: str, bandwidth: float, size: int
) -> Iterator[Row]:
    """Collapses of many segments at once, as a share of the speed of a copy.

    Args:
        shape: of the layers.
        kinds: of kernels.
        device: where.
        bandwidth: bytes a second of a copy, read and written.
        size: bytes of pages to read.
    """
    for bits, keep in ((16, 0.25), (8, 1.0), (4, 1.0), (4, 0.25)):
        caches, src, dst, fresh = _segments(shape, bits, keep, size, device)
        sinks = torch.zeros(len(src), dtype=torch.int64, device=device)
        options = "entropykv", "token", "head", 16, bits
        moved = len(caches) * (
            src.numel() * shape.cold_bytes(2, 16) + dst.numel() * shape.cold_bytes(2, bits)
        )
        calls = {name: partial(ops.collapse, caches, src, dst) for name, ops in kinds.items()}
        if "cuda" in kinds:
            apart = partial(kinds["cuda"].collapse, caches, src, fresh, apart=True)
            calls["cuda, fresh pages"] = apart
        for name, call in calls.items():
            spent = seconds(partial(call, sinks, *options), device)
            row = {"shape": str(shape), "kernel": name, "bits": bits, "keep": keep}
            speed = moved / spent
            yield {**row, "seconds": spent, "GB/s": speed / 1e9, "of copy": speed / bandwidth}


def _segments(
    shape: Shape, bits: int, keep: float, size: int, device: str
) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    """Caches of four layers, segments in them, and pages for what stays: theirs, and others."""
    into = min(4, max(1, size >> 16))
    count = -(-into * shape.cold_tokens(2, bits) // shape.page)
    moves = max(1, size // (4 * count * shape.cold_bytes(2, 16)))
    caches = []
    for _ in range(4):
        heads = shape.kv_heads, shape.page, 2 * shape.head_size
        cache = torch.empty(2 * moves * count, *heads, dtype=torch.bfloat16, device=device)
        page_bytes(cache).random_(0x30, 0x3D)
        caches.append(cache)
    src, other = torch.randperm(2 * moves * count, device=device).view(2, moves, count)
    kept = max(1, int(into * keep))
    return caches, src.contiguous(), src[:, :kept].contiguous(), other[:, :kept].contiguous()
