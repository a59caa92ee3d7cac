# SPDX-License-Identifier: Apache-2.0
"""The native `observe` against that in plain torch, for each instruction set of this machine."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from entropykv_vllm.kernels import native, reference
from tests.kernels.paged import batches, examples, long

if not native.load():
    pytest.skip("the native kernels are not built", allow_module_level=True)
ops = torch.ops.entropykv

# Errors of what a token gets, as a part of it. The loose one is where queries are rounded to
# bfloat16.
TIGHT, LOOSE = 1e-4, 3e-2
FLOAT32_ISAS = ("generic", "avx2", "avx512")

every_isa = pytest.mark.parametrize("isa", native.supported())
# Cold pages, hot tokens and new tokens; of the first kind, some requests have none.
short = st.tuples(st.integers(0, 3), st.integers(0, 130), st.integers(0, 20))
several = st.lists(short, min_size=1, max_size=6)
far = st.lists(long, min_size=1, max_size=2)


def draw_counts(batch):
    """Which rows count, from none to all, and which requests start anew."""
    rows = batch.starts.diff()
    first = (torch.rand(len(rows)) * 1.6 * (rows + 1)).int() - 1
    return first, torch.randint(2, (len(rows),), dtype=torch.int32)


def tolerance(isa, batch):
    pairs = isa not in FLOAT32_ISAS and (batch.bits < 16 or batch.cache.dtype == torch.bfloat16)
    return LOOSE if pairs else TIGHT


def check(mass, expected, tolerance):
    """NaN, which is in all slots that are not in use, must neither spread nor go."""
    torch.testing.assert_close(mass, expected, atol=tolerance / 100, rtol=tolerance, equal_nan=True)


def compare(isa, batch, shared=False):
    first, fresh = draw_counts(batch)
    mass = batch.new_mass(0.01)
    mass = torch.stack([mass, mass], 1)[:, 1] if shared else mass
    expected = batch.observe(reference.observe, mass.clone(), first, fresh)
    before = batch.cache.clone()
    with native.use(isa):
        batch.observe(ops.observe, mass, first, fresh)
    check(mass, expected, tolerance(isa, batch))
    assert torch.equal(batch.cache.view(torch.uint8), before.view(torch.uint8))


@every_isa
@examples(100)
@given(batches(requests=several), st.booleans())
def test_observe(isa, batch, shared):
    compare(isa, batch, shared)


@every_isa
@examples(15)
@given(batches(requests=far))
def test_observe_over_long_contexts(isa, batch):
    compare(isa, batch)


@every_isa
@examples(25)
@given(batches(requests=several))
def test_what_a_row_gives_adds_up_to_one(isa, batch):
    batch.sinks = None
    first, _ = draw_counts(batch)
    with native.use(isa):
        mass = batch.observe(ops.observe, batch.new_mass(9.0), first, torch.ones_like(first))
    rows = (batch.starts.diff() - first.clamp(min=0)).clamp(min=0)
    for request, count in enumerate(rows.tolist()):
        given = [mass[page, :, place] for page, place in batch.slots(request)]
        total = torch.stack([torch.zeros(mass.shape[1]), *given]).sum(0)
        torch.testing.assert_close(total, torch.full_like(total, count), atol=1e-4, rtol=1e-4)


@every_isa
@examples(25)
@given(batches(requests=several))
def test_requests_that_share_all_pages_both_add_to_them(isa, batch):
    new = batch.starts[-1:]
    twice = replace(
        batch,
        query=torch.cat([batch.query, batch.query.flip(0)]),
        starts=torch.cat([batch.starts, batch.starts[1:] + new]),
        **{name: getattr(batch, name).repeat(2, 1) for name in ["table"]},
        **{name: getattr(batch, name).repeat(2) for name in ["cold", "hot"]},
    )
    compare(isa, twice)


@every_isa
@examples(25)
@given(batches(requests=st.one_of(several, far)))
def test_bits_do_not_depend_on_the_number_of_threads(isa, batch):
    first, fresh = draw_counts(batch)
    threads = torch.get_num_threads()
    with native.use(isa):
        alone = batch.observe(ops.observe, batch.new_mass(1.0), first, fresh)
        try:
            for count in (2, 3):
                torch.set_num_threads(count)
                mass = batch.observe(ops.observe, batch.new_mass(1.0), first, fresh)
                assert torch.equal(mass.view(torch.int32), alone.view(torch.int32))
        finally:
            torch.set_num_threads(threads)


@every_isa
@examples(25)
@given(batches(requests=st.one_of(several, far)))
def test_chunks_of_a_prompt_add_up_to_the_whole(isa, batch):
    first, fresh = torch.zeros(2, len(batch.cold), dtype=torch.int32)
    mass, whole = batch.new_mass(0.01), batch.new_mass(0.01)
    with native.use(isa):
        batch.observe(ops.observe, whole, first, fresh)
        for request, rows in enumerate(batch.starts.diff().tolist()):
            cut = int(torch.randint(rows + 1, ()))
            for chunk in ((0, cut), (cut, rows)):
                batch.part(request, *chunk).observe(ops.observe, mass, first[:1], fresh[:1])
    check(mass, whole, TIGHT)


def one_token():
    """Queries, a cache, and the rest up to the sinks of a request with a token in page 1."""
    numbers = torch.tensor([0, 1]), torch.tensor([[1]]), torch.tensor([0]), torch.tensor([1])
    return (torch.ones(1, 2, 16), torch.ones(2, 1, 16, 32)), [x.int() for x in numbers]


@every_isa
def test_a_token_gets_what_its_sinks_leave(isa):
    """Of a logit of 16 and a sink that is as large, half stays; without a sink, all."""
    (query, cache), batch = one_token()
    mass, zero = torch.full((2, 1, 16), 7.0), torch.tensor([0]).int()
    sinks = torch.tensor([16.0, -torch.inf])
    with native.use(isa):
        ops.observe(query, cache, mass, *batch, 16, 1.0, 0.0, sinks, zero, zero + 1)
    torch.testing.assert_close(mass[1, 0], torch.tensor([0.75] + 15 * [0.0]))
    assert (mass[0] == 7.0).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mass": torch.zeros(2, 1, 15)}, "mass is float32"),
        ({"mass": torch.zeros(2, 2, 16)}, "mass is float32"),
        ({"mass": torch.zeros(2, 1, 16).double()}, "mass is float32"),
        ({"mass": torch.zeros(2, 1, 32)[..., ::2]}, "mass is float32"),
        ({"first": torch.tensor([0, 0]).int()}, "one number for each request"),
        ({"fresh": torch.tensor([0])}, "fresh must be contiguous"),
        ({"table": torch.tensor([[2]]).int()}, "page 2 is outside the cache"),
        ({"hot": torch.tensor([17]).int()}, "more tokens than pages"),
        ({"bits": 2}, "not 2"),
    ],
)
def test_what_does_not_fit_is_refused(options, message):
    (query, cache), (starts, table, cold, hot) = one_token()
    zero = torch.tensor([0]).int()
    known = {"query": query, "cache": cache, "mass": torch.zeros(2, 1, 16), "starts": starts}
    known |= {"table": table, "cold": cold, "hot": hot, "bits": 16, "scale": 1.0, "softcap": 0.0}
    known |= {"sinks": None, "first": zero, "fresh": zero}
    with pytest.raises(RuntimeError, match=message):
        ops.observe(**(known | options))
