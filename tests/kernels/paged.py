# SPDX-License-Identifier: Apache-2.0
"""Random caches and batches, with garbage wherever nothing may be read."""

import os
from dataclasses import dataclass, fields, replace

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from entropykv_vllm.kernels import reference
from entropykv_vllm.kernels.formats import cold_capacity, page_bytes, write_cold
from entropykv_vllm.plan.capacity import quantized_bytes

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HEAD_SIZES = (32, 48, 64, 80, 96, 112, 128, 192, 256)
PAGES = (16, 32, 48, 64)
GARBAGE = ("nan", "inf", "noise")

#: Of the examples; `make sanitize` plays fewer, since each takes longer.
SHARE = float(os.environ.get("EXAMPLES_SHARE", 1))

seeds = st.integers(0, 2**31)


def examples(count):
    """As many examples, however long they take."""
    count = max(1, round(count * SHARE))
    return settings(deadline=None, max_examples=count, suppress_health_check=list(HealthCheck))


def garbage(shape, dtype, kind):
    """A tensor that ruins whatever it gets into."""
    if kind == "inf":
        return torch.full(shape, torch.inf, dtype=dtype)
    size = (*shape[:-1], shape[-1] * dtype.itemsize)
    noise = (
        torch.randint(256, size, dtype=torch.uint8) if kind == "noise" else torch.full(size, 255)
    )
    return noise.to(torch.uint8).view(dtype)


def new_cache(pages, heads, page, head_size, dtype, kind, shared):
    """A cache full of garbage; ``shared``: a slice of a tensor that several layers share."""
    if shared:
        return garbage((pages, 2, heads, page, 2 * head_size), dtype, kind)[:, 1]
    return garbage((pages, heads, page, 2 * head_size), dtype, kind)


def fill_cold(cache, pages, keys, values, bits, order="tiles"):
    """Write cold pages, with NaN in the bytes that they do not use."""
    write_cold(cache, pages, keys, values, bits, order)
    page_bytes(cache)[pages, :, used_bytes(cache, bits) :] = 255


def used_bytes(cache, bits):
    """Bytes of one head of a cold page that mean something."""
    head_size = cache.shape[-1] // 2
    if bits == 16:
        return page_bytes(cache).shape[-1]
    return quantized_bytes(cold_capacity(cache, bits), head_size, bits)


def slots_of(pages, page, tokens):
    """The slots of the first ``tokens`` tokens of some pages."""
    return (pages[:, None] * page + torch.arange(page)).flatten()[:tokens]


def strided(x, wide):
    """``x``, or if ``wide`` the same numbers as a part of longer rows, as of a fused QKV."""
    return torch.cat([x, torch.full_like(x, torch.nan)], 1)[:, : x.shape[1]] if wide else x


class Brief:
    """A dataclass whose repr gives only the shapes of long tensors."""

    def __repr__(self):
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        long = {k: v for k, v in values.items() if torch.is_tensor(v) and v.numel() > 60}
        values |= {k: f"<{v.dtype} {tuple(v.shape)}>" for k, v in long.items()}
        return f"{type(self).__name__}({', '.join(f'{k}={v}' for k, v in values.items())})"


@dataclass(repr=False)
class Batch(Brief):
    """The arguments of the attention op but its output."""

    query: torch.Tensor
    cache: torch.Tensor
    starts: torch.Tensor
    table: torch.Tensor
    cold: torch.Tensor
    hot: torch.Tensor
    bits: int
    scale: float
    softcap: float
    sinks: torch.Tensor | None
    order: str = "tiles"

    def run(self, attention):
        """What the op writes, over NaN."""
        output = torch.full(self.query.shape, torch.nan, dtype=self.query.dtype)
        attention(
            self.query,
            self.cache,
            output,
            self.starts,
            self.table,
            self.cold,
            self.hot,
            self.bits,
            self.scale,
            self.softcap,
            self.sinks,
        )
        return output

    def observe(self, op, mass, first, fresh):
        """What the op makes of ``mass`` (changed in place)."""
        batch = self.starts, self.table, self.cold, self.hot, self.bits
        logits = self.scale, self.softcap, self.sinks
        op(self.query, self.cache, mass, *batch, *logits, first, fresh)
        return mass

    def slots(self, request):
        """The page, and the place in it, of each token that a request has room for."""
        page, cold = self.cache.shape[2], int(self.cold[request])
        hot = -(-int(self.hot[request]) // page)
        tokens = [cold_capacity(self.cache, self.bits)] * cold + [page] * hot
        row = self.table[request].tolist()
        return [(p, t) for p, n in zip(row, tokens, strict=False) for t in range(n)]

    def new_mass(self, number):
        """A table that `observe` can add to: a ``number`` in the slots in use, NaN elsewhere."""
        slots = max(self.cache.shape[2], cold_capacity(self.cache, self.bits)) + 3
        mass = torch.full((*self.cache.shape[:2], slots), torch.nan)
        for request in range(len(self.cold)):
            for page, place in self.slots(request):
                mass[page, :, place] = number
        return mass

    def part(self, request, first, last):
        """The query rows ``first`` to ``last`` of a request alone, before the later ones came."""
        start, end = self.starts[request : request + 2].tolist()
        row = slice(request, request + 1)
        return replace(
            self,
            query=self.query[start + first : start + last],
            starts=torch.tensor([0, last - first], dtype=torch.int32),
            table=self.table[row],
            cold=self.cold[row],
            hot=self.hot[row] - (end - start - last),
        )

    def largest_value(self):
        """The largest |value| of a token that is attended to."""
        values = [
            reference._tokens(self.cache, row.long(), int(cold), int(hot), self.bits, self.order)[1]
            for row, cold, hot in zip(self.table, self.cold, self.hot, strict=True)
        ]
        return max((float(x.abs().max()) for x in values if x.numel()), default=0.0)


# Cold pages, hot tokens and new tokens of the requests of a batch.
short = st.tuples(st.integers(0, 3), st.integers(0, 130), st.integers(1, 20))
many = st.tuples(st.integers(0, 2), st.integers(0, 40), st.integers(1, 2))
long = st.sampled_from([(40, 700, 1), (0, 2500, 30), (9, 1500, 70), (30, 1, 1), (3, 900, 500)])
several = st.one_of(
    st.lists(short, min_size=1, max_size=6),
    st.lists(many, min_size=7, max_size=30),
)
never = st.just(False)


@st.composite
def batches(draw, requests=several, shared=never, order="tiles"):
    """A `Batch`, with garbage in unused bytes, pages and table entries.

    ``shared``: whether the cache is a slice of a tensor that several layers share. ``order``: of
    the pages' bytes.
    """
    heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 8))
    head_size, page = draw(st.sampled_from(HEAD_SIZES)), draw(st.sampled_from(PAGES))
    dtype, bits = draw(st.sampled_from(DTYPES)), draw(st.sampled_from([16, 8, 4]))
    requests = [(cold, hot, min(new, hot)) for cold, hot, new in draw(requests)]
    torch.manual_seed(draw(seeds))
    held = [cold + -(-hot // page) for cold, hot, _ in requests]
    spare = 4
    shuffled = torch.randperm(sum(held) + spare)
    table = shuffled[torch.randint(sum(held), len(shuffled), (len(held), max(held) + 1))]
    kind = draw(st.sampled_from(GARBAGE))
    cache = new_cache(len(shuffled), heads, page, head_size, dtype, kind, draw(shared))
    bias = draw(st.sampled_from([0, 3])) * torch.randn(heads, 1, head_size)
    for row, count, own, (cold, hot, _) in zip(
        table, held, shuffled.split([*held, spare]), requests, strict=False
    ):
        row[:count] = own
        keys, values = torch.randn(2, cold, heads, cold_capacity(cache, bits), head_size)
        fill_cold(cache, row[:cold], keys + bias, values, bits, order)
        keys, values = torch.randn(2, hot, heads, head_size)
        slots = slots_of(row[cold:count], page, hot)
        reference.write(keys + bias[:, 0], values, cache, slots, order)
    new = torch.tensor([0] + [new for _, _, new in requests])
    query = torch.randn(int(new.sum()), heads * group, head_size).to(draw(st.sampled_from(DTYPES)))
    return Batch(
        query=strided(query, draw(st.booleans())),
        cache=cache,
        starts=new.cumsum(0).to(torch.int32),
        table=table.to(torch.int32),
        cold=torch.tensor([cold for cold, _, _ in requests], dtype=torch.int32),
        hot=torch.tensor([hot for _, hot, _ in requests], dtype=torch.int32),
        bits=bits,
        scale=head_size**-0.5,
        softcap=draw(st.sampled_from([0.0, 0.0, 5.0, 30.0])),
        sinks=draw(st.sampled_from([None, torch.randn(heads * group) * 3])),
        order=order,
    )
