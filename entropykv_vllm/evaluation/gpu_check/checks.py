# SPDX-License-Identifier: Apache-2.0
"""Every kernel against the reference, on fresh random data."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from entropykv_vllm.evaluation.gpu_check.clock import graphed
from entropykv_vllm.evaluation.gpu_check.pools import Requests, Shape, random_requests
from entropykv_vllm.kernels import reference
from entropykv_vllm.kernels.formats import cold_capacity, page_bytes, write_cold
from entropykv_vllm.kernels.gpu.attention import attention
from entropykv_vllm.kernels.scores import SCORES
from entropykv_vllm.plan.capacity import quantized_bytes

#: What is left after rounding to 16 bits, as a part of the largest value there is.
LOOSE = 2e-2
#: Bytes that may differ where our own scores decide: near ties are broken by rounding.
OTHER_BYTES = 0.03

Check = tuple[str, Callable[[], float], float]

SHAPES = (Shape(32, 8, 128, 32), Shape(28, 4, 128, 64), Shape(9, 3, 64, 32), Shape(6, 2, 80, 16))
DTYPES = (torch.bfloat16, torch.float16)
LENGTHS = (
    [(0, 1, 1)],
    [(3, 77, 1), (0, 300, 1), (11, 64, 1), (1, 33, 1)],
    [(5, 200, 70), (0, 90, 90), (2, 40, 1), (7, 500, 129)],
)


@dataclass(frozen=True)
class Cases:
    """What is checked: all combinations of it."""

    shapes: tuple[Shape, ...]
    dtypes: tuple[torch.dtype, ...]
    lengths: tuple[list[tuple[int, int, int]], ...]
    policies: tuple[str, ...]
    choices: tuple[tuple[str, str], ...]


ALL = Cases(
    SHAPES,
    DTYPES,
    LENGTHS,
    tuple(SCORES),
    tuple(itertools.product(("token", "block"), ("head", "layer"))),
)
#: To try it out, in Triton's interpreter.
FEW = Cases(
    (Shape(4, 2, 32, 32),),
    DTYPES[:1],
    ([(1, 33, 1), (0, 3, 1)], [(1, 20, 9)]),
    ("entropykv",),
    (("token", "head"),),
)


def all_checks(device: str, kinds: dict[str, Any], cases: Cases) -> Iterator[Check]:
    """Name, a function that returns an error, and the largest one that will do."""
    for shape, dtype, bits in itertools.product(cases.shapes, cases.dtypes, (16, 8, 4)):
        if not shape.cold_tokens(2, bits):
            continue
        label = f"{shape} {str(dtype).removeprefix('torch.')} {bits} bits"
        for lengths in cases.lengths:
            yield from _attention(label, shape, dtype, bits, lengths, device)
        for kind, ops in kinds.items():
            yield from _moves(f"{kind}: {label}", ops, shape, dtype, bits, cases, device)
    for kind, ops in kinds.items():
        yield f"{kind}: write", partial(_write, ops, cases.shapes[0], device), 0.0
    if device.startswith("cuda"):
        name = "triton: decode replayed from a CUDA graph"
        yield name, partial(_replay, SHAPES[0], device), LOOSE


def _attention(
    label: str,
    shape: Shape,
    dtype: torch.dtype,
    bits: int,
    lengths: list[tuple[int, int, int]],
    device: str,
) -> Iterator[Check]:
    def error(softcap: float, with_sinks: bool) -> float:
        made = random_requests(shape, dtype, bits, lengths, softcap, with_sinks)
        return _difference(made, attend(made.to(device)))

    kind = "prefill" if max(new for *_, new in lengths) > 1 else "decode"
    yield f"triton: {kind} {label}", partial(error, 0.0, False), LOOSE
    yield f"triton: {kind} {label}, capped, sinks", partial(error, 20.0, True), LOOSE


def attend(requests: Requests) -> Tensor:
    """What our kernels make of some requests."""
    output = torch.full_like(requests.query, torch.nan)
    most = requests.most_queries
    attention(requests.query, requests.cache, output, *requests.arguments, longest=most)
    return output


def _difference(requests: Requests, found: Tensor) -> float:
    """The largest error, as a part of the largest value that is attended to."""
    expected = torch.empty_like(requests.query)
    attend_here = partial(reference.attention, order="rows")
    attend_here(requests.query, requests.cache, expected, *requests.arguments)
    error = (found.cpu().double() - expected.double()).abs().max()
    rows = zip(requests.table.long(), requests.cold.tolist(), requests.hot.tolist(), strict=True)
    values = [reference._tokens(requests.cache, *row, requests.bits, "rows")[1] for row in rows]
    return float(error) / max(float(x.abs().max()) for x in values)


def _moves(
    label: str,
    ops: Any,
    shape: Shape,
    dtype: torch.dtype,
    bits: int,
    cases: Cases,
    device: str,
) -> Iterator[Check]:
    def collapse(policy: str, choice: tuple[str, str], given: bool) -> float:
        return _collapse(ops, shape, dtype, policy, choice, bits, given, device)

    for choice in cases.choices:
        name = f"{label}, collapse by given scores, {' and '.join(choice)}"
        yield name, partial(collapse, "entropykv", choice, True), 0.0
    for policy in cases.policies:
        name = f"{label}, collapse by {policy}"
        yield name, partial(collapse, policy, ("token", "head"), False), OTHER_BYTES
    if bits < 16:
        yield f"{label}, merge", partial(_merge, ops, shape, dtype, bits, device), OTHER_BYTES
        yield f"{label}, drop", partial(_drop, ops, shape, dtype, bits, device), 0.0


def _caches(shape: Shape, dtype: torch.dtype, pages: int, layers: int = 2) -> list[Tensor]:
    size = pages, shape.kv_heads, shape.page, 2 * shape.head_size
    return [torch.randn(size).to(dtype) for _ in range(layers)]


def _collapse(
    ops: Any,
    shape: Shape,
    dtype: torch.dtype,
    policy: str,
    choice: tuple[str, str],
    bits: int,
    given: bool,
    device: str,
) -> float:
    """The share of bytes that differ after moves in place and into fresh pages."""
    target = shape.cold_tokens(2, bits)
    count = -(-2 * target // shape.page)
    caches = _caches(shape, dtype, 4 * count)
    order = torch.randperm(4 * count)
    src = order[: 3 * count].view(3, count)
    dst = torch.stack([src[0, :1], src[1, :1], order[-1:]])
    sinks = torch.tensor([4, 0, target + 3])
    size = len(caches), 3, shape.kv_heads, count * shape.page
    scores = torch.randn(size) if given else None
    options = policy, *choice, 16, bits
    arguments = src, dst, sinks, *options
    return _compare(ops.collapse, reference.collapse, caches, arguments, device, bits, scores)


def _merge(ops: Any, shape: Shape, dtype: torch.dtype, bits: int, device: str) -> float:
    caches = _cold_caches(shape, dtype, bits)
    src, sinks = torch.randperm(8).view(4, 2), torch.tensor([0, 2, 0, 5])
    options = "entropykv", "token", "head", bits, bits
    arguments = src, src[:, :1], sinks, *options
    return _compare(ops.collapse, reference.collapse, caches, arguments, device, bits)


def _drop(ops: Any, shape: Shape, dtype: torch.dtype, bits: int, device: str) -> float:
    caches = _cold_caches(shape, dtype, bits)
    src, sinks = torch.randperm(8).view(2, 4), torch.tensor([0, 3])
    scores = torch.randn(len(caches), 2, shape.kv_heads, 4 * shape.cold_tokens(2, bits))
    arguments = src, src[:, 1:3], sinks, "norm", bits
    return _compare(ops.drop, reference.drop, caches, arguments, device, bits, scores)


def _cold_caches(shape: Shape, dtype: torch.dtype, bits: int) -> list[Tensor]:
    caches = _caches(shape, dtype, 8)
    for cache in caches:
        size = 8, shape.kv_heads, cold_capacity(cache, bits), shape.head_size
        keys, values = torch.randn(2, *size)
        write_cold(cache, torch.arange(8), keys, values, bits, "rows")
    return caches


def _compare(
    op: Callable[..., None],
    twin: Callable[..., None],
    caches: list[Tensor],
    arguments: tuple[Any, ...],
    device: str,
    bits: int,
    scores: Tensor | None = None,
) -> float:
    """The share of bytes that differ; it must be the same bytes when the op is run again."""
    moved = [x.to(device) if torch.is_tensor(x) else x for x in (*arguments, scores)]
    runs = []
    for _ in range(2):
        there = [cache.to(device, copy=True) for cache in caches]
        op(there, *moved)
        runs.append([_that_count(cache.cpu(), arguments, bits) for cache in there])
    if not all(map(torch.equal, *runs)):
        return 1.0
    wrong = total = 0
    for layer, (cache, found) in enumerate(zip(caches, runs[0], strict=True)):
        twin(cache, *arguments, None if scores is None else scores[layer], order="rows")
        wrong += int((_that_count(cache, arguments, bits) != found).sum())
        total += found.numel()
    return wrong / total


def _that_count(cache: Tensor, arguments: tuple[Any, ...], bits: int) -> Tensor:
    """The bytes of all pages, but for those at the end of quantized ones, which mean nothing."""
    raw = page_bytes(cache).clone()
    if bits < 16:
        used = quantized_bytes(cold_capacity(cache, bits), cache.shape[-1] // 2, bits)
        raw[arguments[1].flatten(), :, used:] = 0
    return raw


def _write(ops: Any, shape: Shape, device: str) -> float:
    cache = _caches(shape, torch.bfloat16, 9, 1)[0]
    keys, values = torch.randn(2, 70, shape.kv_heads, shape.head_size).bfloat16()
    slots = torch.randperm(9 * shape.page)[:70]
    slots[::7] = -1
    there = cache.to(device, copy=True)
    ops.write(keys.to(device), values.to(device), there, slots.to(device))
    reference.write(keys, values, cache, slots, "rows")
    return float((page_bytes(there).cpu() != page_bytes(cache)).float().mean())


def _replay(shape: Shape, device: str) -> float:
    """A graph that was captured over other requests must see those that there are now."""
    captured = random_requests(shape, torch.bfloat16, 4, [(9, 90, 1), (8, 10, 1)])
    other = random_requests(shape, torch.bfloat16, 4, [(3, 120, 1), (0, 65, 1)])
    there = captured.to(device)
    output = torch.empty_like(there.query)

    def call() -> None:
        attention(there.query, there.cache, output, *there.arguments, longest=1)

    replay = graphed(call, device)
    for name in ("query", "cold", "hot"):
        getattr(there, name).copy_(getattr(other, name))
    there.cache[: len(other.cache)] = other.cache.to(device)
    there.table[:, : other.table.shape[1]] = other.table.to(device)
    replay()
    return _difference(other, output)
