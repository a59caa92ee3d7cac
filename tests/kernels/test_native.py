# SPDX-License-Identifier: Apache-2.0
"""The native ops against those in plain torch, for each instruction set that this machine has."""

import os
import subprocess
import sys
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from entropykv_vllm.kernels import formats, reference
from entropykv_vllm.kernels.layout import read_pages
from entropykv_vllm.kernels.scores import SCORES
from entropykv_vllm.plan.capacity import quantized_bytes
from tests.kernels.paged import (
    DTYPES,
    GARBAGE,
    HEAD_SIZES,
    PAGES,
    Brief,
    batches,
    examples,
    fill_cold,
    garbage,
    long,
    new_cache,
    seeds,
    slots_of,
    strided,
    used_bytes,
)

native = pytest.importorskip(
    "entropykv_vllm.kernels.native", reason="the loader of the native kernels is not there"
)
if not native.load():
    pytest.skip("the native kernels are not built", allow_module_level=True)
ops = torch.ops.entropykv

# Errors of attention, as a part of the largest |value|. The tight one is for float32 throughout, in
# instruction sets that compute in it; else 16 bit numbers are rounded or multiplied somewhere.
TIGHT, LOOSE = 2e-5, 1.5e-2
FLOAT32_ISAS = ("generic", "avx2", "avx512")
# Scores are added up in another order, so these are as good as equal.
TIE = 1e-5
# Codes may differ by one step where a quotient lies half way between two.
OTHER_CODES = 1e-3

every_isa = pytest.mark.parametrize("isa", native.supported())


def same_bytes(a, b):
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


# -- write ----------------------------------------------------------------------------------------


@every_isa
@examples(60)
@given(
    heads=st.integers(1, 4),
    head_size=st.sampled_from(HEAD_SIZES),
    page=st.sampled_from(PAGES),
    dtype=st.sampled_from(DTYPES),
    new_dtype=st.sampled_from(DTYPES),
    tokens=st.integers(0, 70),
    wide=st.booleans(),
    seed=seeds,
)
def test_write(isa, heads, head_size, page, dtype, new_dtype, tokens, wide, seed):
    """Slots in any order, some skipped; every other byte of the cache stays as it was."""
    torch.manual_seed(seed)
    cache = new_cache(9, heads, page, head_size, dtype, "noise", False)
    expected = cache.clone()
    slots = torch.randperm(9 * page)[:tokens]
    slots[torch.rand(len(slots)) < 0.2] = -1
    sides = torch.randn(2, len(slots), heads, head_size).to(new_dtype)
    keys, values = (strided(x, wide) for x in sides)
    reference.write(keys, values, expected, slots)
    with native.use(isa):
        ops.write(keys, values, cache, slots)
    assert same_bytes(cache, expected)


# -- attention ------------------------------------------------------------------------------------


def tolerance(isa, batch):
    exact = isa in FLOAT32_ISAS and batch.cache.dtype == batch.query.dtype == torch.float32
    return TIGHT if exact else LOOSE


def check_attention(isa, batch):
    expected = batch.run(reference.attention)
    before = batch.cache.clone()
    with native.use(isa):
        output = batch.run(ops.attention)
    assert same_bytes(batch.cache, before)
    if len(output):
        error = (output.double() - expected.double()).abs().max()
        assert error <= tolerance(isa, batch) * batch.largest_value()


@every_isa
@examples(150)
@given(batches())
def test_attention(isa, batch):
    check_attention(isa, batch)


@every_isa
@examples(15)
@given(batches(requests=st.lists(long, min_size=1, max_size=2)))
def test_attention_over_long_contexts(isa, batch):
    check_attention(isa, batch)


def check_rows(isa, batch):
    """Rows alone, in other chunks and with other numbers of threads."""
    threads = torch.get_num_threads()
    with native.use(isa):
        output = batch.run(ops.attention)
        for request in range(len(batch.cold)):
            start, end = batch.starts[request : request + 2].tolist()
            rows = torch.randint(max(end - start, 1), (2,)).sort().values.tolist()
            cuts = [(0, rows[0]), (rows[0], rows[0] + 1), (rows[1], end - start)]
            for first, last in cuts if end > start else []:
                part = batch.part(request, first, last).run(ops.attention)
                assert same_bytes(part, output[start + first : start + last])
        try:
            torch.set_num_threads(3)
            assert same_bytes(batch.run(ops.attention), output)
        finally:
            torch.set_num_threads(threads)


@every_isa
@examples(60)
@given(batches())
def test_bits_of_a_row_do_not_depend_on_the_batch(isa, batch):
    check_rows(isa, batch)


@every_isa
@examples(10)
@given(batches(requests=st.lists(long, min_size=1, max_size=2)))
def test_bits_of_a_row_do_not_depend_on_the_chunk(isa, batch):
    check_rows(isa, batch)


# -- collapse and drop ----------------------------------------------------------------------------


@dataclass(repr=False)
class Moves(Brief):
    """The arguments of collapse, or of drop, which has no granularity and scope."""

    cache: torch.Tensor
    src: torch.Tensor
    dst: torch.Tensor
    sinks: torch.Tensor
    policy: str
    bits: int
    granularity: str = "token"
    scope: str = "head"

    def one(self, cache, i):
        """Move ``i`` alone, of this cache."""
        part = slice(i, i + 1)
        moves = {"src": self.src[part], "dst": self.dst[part], "sinks": self.sinks[part]}
        return replace(self, cache=cache, **moves)

    def collapse(self, op, *given):
        cache = self.cache.clone()
        choice = self.policy, self.granularity, self.scope, 16, self.bits
        op(cache, self.src, self.dst, self.sinks, *choice, *given)
        return cache

    def drop(self, op, *given):
        cache = self.cache.clone()
        op(cache, self.src, self.dst, self.sinks, self.policy, self.bits, *given)
        return cache


def draw_destinations(draw, src, m):
    """Pages of each move: its own, fresh ones, or what the move before it has freed."""
    n, s = src.shape
    fresh = torch.arange(n * m).view(n, m) + int(src.max()) + 1
    kind = draw(st.sampled_from(["own", "fresh", "freed"]))
    own = torch.stack([pages[torch.randperm(s)[:m]] for pages in src])
    if kind == "freed" and s >= 2 * m:
        return torch.cat([fresh[:1], src[:-1, -m:]])
    return own if kind == "own" else fresh


def draw_tokens(shape, dtype, few):
    """Keys and values; ``few``: of three kinds, so that most tokens are as good as others."""
    *_, heads, dim = shape
    kinds = (3, heads, dim) if few else shape
    keys, values = torch.randn(2, *kinds)
    keys, values = keys + torch.randn(heads, dim), values * (0.5 + torch.rand(*kinds[:-1], 1))
    if few:
        chosen = torch.randint(3, shape[:1])
        keys, values = keys[chosen], values[chosen]
    return keys.to(dtype), values.to(dtype)


@st.composite
def collapses(draw):
    heads, head_size = draw(st.integers(1, 3)), draw(st.sampled_from(HEAD_SIZES))
    page, dtype = draw(st.sampled_from(PAGES)), draw(st.sampled_from(DTYPES))
    bits, n, m = draw(st.sampled_from([16, 8, 4])), draw(st.integers(1, 3)), draw(st.integers(1, 2))
    few = draw(st.booleans())
    # Which neighbours a token has cannot be told from its bytes, if others have the same.
    policies = [p for p in native.SCORES if not (few and p == "entropykv")]
    torch.manual_seed(draw(seeds))
    kind = draw(st.sampled_from(GARBAGE))
    probe = new_cache(1, heads, page, head_size, dtype, kind, False)
    keep = m * formats.cold_capacity(probe, bits)
    s = -(-keep // page) + draw(st.integers(0, 3))
    src = torch.randperm(n * s).view(n, s) + 2
    cache = new_cache(n * s + 2 + n * m, heads, page, head_size, dtype, kind, False)
    keys, values = draw_tokens((n * s * page, heads, head_size), dtype, few)
    reference.write(keys, values, cache, slots_of(src.flatten(), page, len(keys)))
    return Moves(
        cache=cache,
        src=src,
        dst=draw_destinations(draw, src, m),
        sinks=torch.tensor(draw(st.lists(st.integers(0, keep + 3), min_size=n, max_size=n))),
        policy=draw(st.sampled_from(policies)),
        bits=bits,
        granularity=draw(st.sampled_from(["token", "block"])),
        scope=draw(st.sampled_from(["head", "layer"])),
    )


def check_choice(kept, worth, protect, slack):
    """No unit that is left out is better than one that is ``kept`` (ascending, of one head)."""
    units = torch.arange(len(worth))
    inside = torch.isin(units, kept)
    protect = min(protect, len(kept))
    assert inside[:protect].all()
    free = inside & (units >= protect)
    if free.any() and not inside.all():
        assert worth[free].min() >= worth[~inside].max() - slack


def find_in_order(written, tokens):
    """Ascending indices of the rows of ``tokens`` that were ``written``, up to their rounding."""
    apart = torch.cdist(written, tokens, compute_mode="donot_use_mm_for_euclid_dist")
    near = apart <= apart.amin(-1, keepdim=True) * 1.001 + 1e-6
    found, last = [], -1
    for row in near:
        later = row[last + 1 :].nonzero()
        assert len(later), "tokens are out of order, doubled or torn"
        last += 1 + int(later[0])
        found.append(last)
    return torch.tensor(found)


def worth_of_units(moves, keys, values, run):
    """float64 ``[heads or 1, units]`` that is compared, and what counts as a tie."""
    scores = SCORES[moves.policy](keys, values).double()
    if moves.scope == "layer":
        spread = scores.std(-1, correction=0, keepdim=True).clamp(min=1e-12)
        scores = ((scores - scores.mean(-1, keepdim=True)) / spread).sum(0, keepdim=True)
    size = float(scores.abs().max())
    if moves.scope == "head":
        # These are differences of larger numbers.
        size = {"keydiff": 1.0, "entropykv": float(values.float().norm(dim=-1).max())}.get(
            moves.policy, size
        )
    return scores.unflatten(-1, (-1, run)).mean(-1), TIE * max(size, 1e-3)


def survivors(moves, after, run):
    """Indices ``[heads, kept / run]`` of the runs of tokens in a single move's destination."""
    before = _by_head(*read_pages(moves.cache, moves.src[0]))
    new = _by_head(*formats.read_cold(after, moves.dst[0], moves.bits))
    # [heads, runs, numbers of the run's keys and values]
    before, new = (
        torch.cat([x.float().unflatten(1, (-1, run)).flatten(2) for x in sides], -1)
        for sides in (before, new)
    )
    if moves.scope == "layer":
        found = find_in_order(*(x.transpose(0, 1).flatten(1) for x in (new, before)))
        return found.expand(len(new), -1)
    return torch.stack([find_in_order(*pair) for pair in zip(new, before, strict=True)])


def _by_head(keys, values):
    return [x.transpose(0, 1).flatten(1, 2) for x in (keys, values)]


def check_collapse(moves, after):
    """One move: the survivors are the best, and the bytes are those of the survivors."""
    keys, values = _by_head(*read_pages(moves.cache, moves.src[0]))
    run = 16 if moves.granularity == "block" else 1
    units = survivors(moves, after, run)
    protect = -(-int(moves.sinks[0]) // run)
    worth, slack = worth_of_units(moves, keys, values, run)
    for of_head, kept in zip(worth.expand(len(keys), -1), units, strict=True):
        check_choice(kept, of_head, protect, slack)
    kept = (units[..., None] * run + torch.arange(run)).flatten(1)
    expected = moves.cache.clone()
    best = (torch.take_along_dim(x, kept[..., None], 1) for x in (keys, values))
    by_page = (x.unflatten(1, (moves.dst.shape[1], -1)).transpose(0, 1) for x in best)
    formats.write_cold(expected, moves.dst[0], *by_page, bits=moves.bits)
    check_cold_pages(after, expected, moves.dst[0], moves.bits)
    check_others(after, moves.cache, moves.dst)


def check_others(after, before, written):
    others = torch.ones(len(after), dtype=torch.bool)
    others[written.flatten()] = False
    assert same_bytes(after[others], before[others])


def check_cold_pages(cache, expected, pages, bits):
    """Equal bytes, but for a few codes that may be off by one, and which NaN a NaN is."""
    if bits == 16:
        for ours, theirs in zip(read_pages(cache, pages), read_pages(expected, pages), strict=True):
            assert same_bytes(ours.isnan(), theirs.isnan())
            assert same_bytes(ours.nan_to_num(0.0), theirs.nan_to_num(0.0))
        return
    used, head_size = used_bytes(cache, bits), cache.shape[-1] // 2
    ours, theirs = (formats.page_bytes(x)[pages, :, :used] for x in (cache, expected))
    codes = 2 * formats.cold_capacity(cache, bits) * head_size * bits // 8
    assert used == quantized_bytes(formats.cold_capacity(cache, bits), head_size, bits)
    floats = [x[..., codes:].contiguous().view(torch.float16) for x in (ours, theirs)]
    assert torch.equal(*(x.float() for x in floats))
    steps = (decode(ours[..., :codes], bits) - decode(theirs[..., :codes], bits)).abs()
    assert steps.max() <= 1
    assert steps.sum() <= max(1, OTHER_CODES * steps.numel())


def decode(stored, bits):
    """Codes as integers, in the order of the bytes."""
    stored = stored.int()
    if bits == 4:
        return torch.stack([stored & 15, stored >> 4], -1)
    return torch.where(stored > 127, 128 - stored, stored)


def used_equal(a, b, moves):
    """Whether two caches are equal but for the unused bytes of the moves' destinations."""
    used = used_bytes(a, moves.bits)
    written = moves.dst.flatten()
    same = [formats.page_bytes(x)[written, :, :used] for x in (a, b)]
    check_others(a, b, written)
    return torch.equal(*same)


def check_moves(moves, carry_out, check):
    """Each move by itself, then all of them in one call."""
    cache = moves.cache
    for i in range(len(moves.src)):
        single = moves.one(cache, i)
        cache = carry_out(single)
        check(single, cache)
    assert used_equal(carry_out(moves), cache, moves)


@every_isa
@examples(80)
@given(collapses())
def test_collapse(isa, moves):
    with native.use(isa):
        check_moves(moves, lambda some: some.collapse(ops.collapse), check_collapse)


@every_isa
@pytest.mark.parametrize("granularity", ["token", "block"])
def test_a_later_move_reads_what_an_earlier_one_wrote(isa, granularity):
    torch.manual_seed(0)
    cache = torch.randn(9, 3, 32, 160, dtype=torch.bfloat16)
    src, dst = torch.tensor([[1, 2, 3], [4, 5, 1]]), torch.tensor([[1], [3]])
    choice = torch.tensor([3, 0]), "norm", granularity, "head", 16, 16
    expected, ours = cache.clone(), cache.clone()
    reference.collapse(expected, src, dst, *choice)
    with native.use(isa):
        ops.collapse(ours, src, dst, *choice)
    assert same_bytes(ours, expected)


@every_isa
@pytest.mark.parametrize("policy", ["norm", "knorm"])
@pytest.mark.parametrize("levels", [1, 2])
def test_of_equal_tokens_the_earlier_stay(isa, policy, levels):
    """Keys and values with a single number each have the same norm in any order of additions."""
    page, head_size, s = 32, 32, 4
    t = torch.arange(s * page)
    keys, values = torch.zeros(2, len(t), 2, head_size)
    keys[t, :, t % head_size] = 1.0 + (t * 7 % 5 % levels)[:, None]
    values[t, :, t // head_size] = 1.0
    cache = torch.zeros(6, 2, page, 2 * head_size)
    src, dst = torch.tensor([[1, 2, 3, 4]]), torch.tensor([[5]])
    reference.write(keys, values, cache, slots_of(src[0], page, len(t)))
    expected, choice = cache.clone(), (torch.tensor([0]), policy, "token", "head", 16, 16)
    reference.collapse(expected, src, dst, *choice)
    with native.use(isa):
        ops.collapse(cache, src, dst, *choice)
    assert same_bytes(cache, expected)


@every_isa
@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_that_are_not_numbers_go_first(isa, bits, dtype):
    """What is kept of them, since pages must be full, counts as 0 in quantized pages."""
    torch.manual_seed(1)
    cache = new_cache(40, 2, 32, 64, dtype, "nan", False)
    keep = formats.cold_capacity(cache, bits)
    s = keep // 32 + 3
    keys, values = torch.randn(2, 32 * s, 2, 64).to(dtype)
    keys[torch.randperm(len(keys))[: len(keys) - keep + 9]] = torch.nan
    src, dst = torch.arange(1, s + 1)[None], torch.tensor([[39]])
    reference.write(keys, values, cache, slots_of(src[0], 32, len(keys)))
    expected, choice = cache.clone(), (torch.tensor([2]), "norm", "token", "head", 16, bits)
    reference.collapse(expected, src, dst, *choice)
    with native.use(isa):
        ops.collapse(cache, src, dst, *choice)
    check_cold_pages(cache, expected, dst[0], bits)


@every_isa
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("policy", ["random", "sink"])
@pytest.mark.parametrize("scope", ["head", "layer"])
def test_cold_pages_are_merged(isa, bits, policy, scope):
    """Their scores are exact, so the same tokens stay; what stays is quantized anew."""
    torch.manual_seed(2)
    cache = new_cache(9, 3, 32, 64, torch.bfloat16, "nan", False)
    tokens = formats.cold_capacity(cache, bits)
    src, dst = torch.tensor([[1, 2], [3, 4], [1, 3]]), torch.tensor([[1], [3], [7]])
    fill_cold(cache, src[:2].flatten(), *torch.randn(2, 4, 3, tokens, 64), bits)
    expected, choice = cache.clone(), (torch.tensor([4, 0, 9]), policy, "token", scope, bits, bits)
    reference.collapse(expected, src, dst, *choice)
    with native.use(isa):
        ops.collapse(cache, src, dst, *choice)
    check_cold_pages(cache, expected, dst.flatten(), bits)
    check_others(cache, expected, dst)


@st.composite
def drops(draw):
    heads, head_size = draw(st.integers(1, 3)), draw(st.sampled_from(HEAD_SIZES))
    page, dtype = draw(st.sampled_from(PAGES)), draw(st.sampled_from(DTYPES))
    bits, n, s = draw(st.sampled_from([8, 4])), draw(st.integers(1, 3)), draw(st.integers(1, 5))
    m = draw(st.integers(1, s))
    torch.manual_seed(draw(seeds))
    src = torch.randperm(n * s).view(n, s) + 2
    kind = draw(st.sampled_from(GARBAGE))
    cache = new_cache(n * s + 2 + n * m, heads, page, head_size, dtype, kind, False)
    tokens = formats.cold_capacity(cache, bits)
    size = 1 + torch.rand(2, n, s, heads, 1, 1)
    keys, values = torch.randn(2, n, s, heads, tokens, head_size) * size
    policy = draw(st.sampled_from(native.SCORES))
    # Two pages alike, where a score has nothing to do with the neighbours.
    if policy != "entropykv" and draw(st.booleans()):
        keys[:, -1], values[:, -1] = keys[:, 0], values[:, 0]
    fill_cold(cache, src, keys + torch.randn(head_size), values, bits)
    return Moves(
        cache=cache,
        src=src,
        dst=draw_destinations(draw, src, m),
        sinks=torch.tensor(draw(st.lists(st.integers(0, tokens), min_size=n, max_size=n))),
        policy=policy,
        bits=bits,
    )


def check_drop(moves, after):
    """One move: each head's pages are copies of its best ones, in their order."""
    used = used_bytes(after, moves.bits)
    old = formats.page_bytes(moves.cache)[moves.src[0], :, :used]
    new = formats.page_bytes(after)[moves.dst[0], :, :used]
    sides = _by_head(*formats.read_cold(moves.cache, moves.src[0], moves.bits))
    worth, slack = worth_of_units(moves, *sides, sides[0].shape[1] // len(old))
    for head, of_head in enumerate(worth):
        kept, last = [], -1
        for page in new[:, head]:
            equal = (old[last + 1 :, head] == page).all(-1).nonzero()
            assert len(equal), "a page is no copy of one of the head's, or out of order"
            last += 1 + int(equal[0])
            kept.append(last)
        check_choice(torch.tensor(kept), of_head, int(moves.sinks[0] > 0), slack)
    check_others(after, moves.cache, moves.dst)


@every_isa
@examples(80)
@given(drops())
def test_drop(isa, moves):
    with native.use(isa):
        check_moves(moves, lambda some: some.drop(ops.drop), check_drop)


# -- scores from outside, and numbers that go with the tokens -------------------------------------


def balanced_scores(*shape):
    """As many 1 as -1 in each row, so that standardizing and adding up is exact; and others."""
    others = torch.tensor([torch.nan, torch.inf, -torch.inf])[torch.randint(3, (shape[-1] // 4,))]
    ones = torch.ones(2, (shape[-1] - len(others)) // 2) * torch.tensor([[1.0], [-1.0]])
    row = torch.cat([others, ones.flatten()])
    return row[torch.rand(shape).argsort(-1)]


def new_side(moves, tokens, shared):
    """A number for each slot, anything at all; ``shared``: a slice of that of several layers."""
    blocks, heads = moves.cache.shape[:2]
    capacity = formats.cold_capacity(moves.cache, moves.bits)
    side = garbage((blocks, 2, heads, max(tokens, capacity) + 2), torch.float32, "noise")
    return side[:, 1] if shared else side[:, 1].contiguous()


def check_given(isa, carry_out, moves, scores, side):
    """Both implementations choose the same, and leave the same in all slots of ``side``."""
    moves, kept = replace(moves, policy="any"), side.clone()
    name = carry_out.__name__
    expected = carry_out(moves, getattr(reference, name), scores, kept)
    with native.use(isa):
        cache = carry_out(moves, getattr(ops, name), scores, side)
    assert same_bytes(side, kept)
    check_cold_pages(cache, expected, moves.dst.flatten(), moves.bits)
    check_others(cache, expected, moves.dst)


@every_isa
@examples(80)
@given(collapses(), st.booleans())
def test_collapse_by_given_scores(isa, moves, shared):
    page = moves.cache.shape[2]
    scores = balanced_scores(len(moves.src), moves.cache.shape[1], moves.src.shape[1] * page)
    check_given(isa, Moves.collapse, moves, scores, new_side(moves, page, shared))


@every_isa
@examples(80)
@given(drops(), st.booleans())
def test_drop_by_given_scores(isa, moves, shared):
    """Scores whose sums are exact, and some pages with one that is no number."""
    tokens = formats.cold_capacity(moves.cache, moves.bits)
    shape = len(moves.src), moves.cache.shape[1], moves.src.shape[1], tokens
    scores = torch.randint(-1, 2, shape).float()
    scores[..., -1].masked_fill_(torch.rand(shape[:-1]) < 0.2, torch.nan)
    check_given(isa, Moves.drop, moves, scores.flatten(2), new_side(moves, tokens, shared))


@every_isa
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("scope", ["head", "layer"])
def test_merges_by_given_scores(isa, bits, scope):
    """In place, as merges are: all numbers of a move are read before one is written."""
    torch.manual_seed(3)
    cache = new_cache(9, 3, 32, 64, torch.bfloat16, "nan", False)
    tokens = formats.cold_capacity(cache, bits)
    src, dst = torch.tensor([[1, 2], [3, 4]]), torch.tensor([[2], [3]])
    fill_cold(cache, src.flatten(), *torch.randn(2, 4, 3, tokens, 64), bits)
    scores, side = balanced_scores(2, 3, 2 * tokens), torch.randn(9, 3, tokens)
    expected, kept = cache.clone(), side.clone()
    choice = torch.tensor([4, 0]), "any", "token", scope, bits, bits, scores
    reference.collapse(expected, src, dst, *choice, kept)
    with native.use(isa):
        ops.collapse(cache, src, dst, *choice, side)
    assert torch.equal(side, kept)
    check_cold_pages(cache, expected, dst.flatten(), bits)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"scores": torch.zeros(1, 2, 15)}, "scores are float32"),
        ({"scores": torch.zeros(1, 2, 16).double()}, "scores are float32"),
        ({"scores": torch.zeros(1, 16, 2).mT}, "scores are float32"),
        ({"side": torch.zeros(3, 2, 15)}, "side is float32"),
        ({"side": torch.zeros(3, 1, 16)}, "side is float32"),
        ({"side": torch.zeros(2, 2, 16)}, "side is float32"),
    ],
)
def test_what_does_not_fit_the_pages_is_refused(given, message):
    cache, one = torch.zeros(3, 2, 16, 32), torch.tensor([[1]])
    with pytest.raises(RuntimeError, match=message):
        ops.drop(cache, one, one, one[0], "norm", 16, **given)


# -- which instruction set ------------------------------------------------------------------------


def isa_of_a_process(name):
    """What a new process says when ENTROPYKV_ISA has this value."""
    code = "from entropykv_vllm.kernels import native; print(native.isa())"
    environment = os.environ | {"ENTROPYKV_ISA": name}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )


def test_an_unknown_instruction_set_is_refused():
    process = isa_of_a_process("avx513")
    assert process.returncode
    assert "ValueError: ENTROPYKV_ISA is 'avx513', not one of generic" in process.stderr


def test_the_environment_lowers_the_instruction_set():
    assert isa_of_a_process("generic").stdout.strip() == "generic"


def test_the_stride_of_a_single_head_does_not_matter():
    """As torch leaves it: that of a dimension of one is any number."""
    cache = torch.zeros(2, 1, 16, 64)
    rows = torch.randn(1, 5, 1, 32).transpose(1, 2).transpose(1, 2)[0]
    odd = torch.as_strided(rows, rows.shape, (32, 7, 1))
    torch.ops.entropykv.write(odd, odd, cache, torch.arange(5))
    expected = torch.zeros_like(cache)
    reference.write(rows, rows, expected, torch.arange(5))
    assert torch.equal(cache, expected)
    counts = [torch.tensor(n, dtype=torch.int32) for n in ([0, 5], [[0, 0]], [0], [5])]
    out, plain = torch.zeros_like(rows), torch.zeros_like(rows)
    torch.ops.entropykv.attention(odd, cache, out, *counts, 16, 1.0, 0.0, None)
    reference.attention(rows, expected, plain, *counts, 16, 1.0, 0.0, None)
    torch.testing.assert_close(out, plain)
