# SPDX-License-Identifier: Apache-2.0
"""Collapses, merges and drops, over several layers at once."""

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from entropykv_vllm.kernels import reference
from entropykv_vllm.kernels.formats import (
    FP16_MAX,
    cold_capacity,
    page_bytes,
    read_cold,
)
from entropykv_vllm.kernels.gpu import collapse as ours
from entropykv_vllm.kernels.gpu.token_scores import token_scores
from entropykv_vllm.kernels.layout import read_pages
from entropykv_vllm.kernels.scores import SCORES
from tests.kernels.paged import (
    DTYPES,
    GARBAGE,
    HEAD_SIZES,
    PAGES,
    fill_cold,
    garbage,
    seeds,
    slots_of,
    used_bytes,
)

POLICIES = sorted(SCORES)


def examples(count):
    phases = [Phase.explicit, Phase.generate]  # The interpreter is too slow to shrink in.
    quiet = list(HealthCheck)
    return settings(deadline=None, max_examples=count, suppress_health_check=quiet, phases=phases)


class Layers:
    """Two layers of one pool, with moves of ``s`` pages to ``m``; scores with many ties."""

    def __init__(self, draw, from_bits, bits):
        heads, head_size = draw(st.integers(1, 2)), draw(st.sampled_from(HEAD_SIZES))
        page, dtype = draw(st.sampled_from(PAGES)), draw(st.sampled_from(DTYPES))
        moves, m = draw(st.integers(1, 2)), draw(st.integers(1, 2))
        torch.manual_seed(draw(seeds))
        kind = draw(st.sampled_from(GARBAGE))
        probe = torch.empty(1, heads, page, 2 * head_size, dtype=dtype)
        self.source, self.target = cold_capacity(probe, from_bits), cold_capacity(probe, bits)
        s = -(-m * self.target // self.source) + draw(st.integers(0, 2))
        blocks = moves * (s + m) + 2
        self.caches = garbage((blocks, 2, heads, page, 2 * head_size), dtype, kind).unbind(1)
        ids = torch.randperm(blocks - 2) + 2
        self.src = ids[: moves * s].view(moves, s)
        self.dst = self._destinations(draw(st.sampled_from(["own", "fresh", "freed"])), ids, m)
        self.sinks = torch.randint(m * self.target + 3, (moves,))
        for cache in self.caches:
            self._fill(cache, from_bits)
        self.scores = torch.randint(-3, 4, (2, moves, heads, s * self.source)).float()
        self.scores[torch.rand(self.scores.shape) < 0.1] = draw(
            st.sampled_from([torch.nan, torch.inf, -torch.inf, 0.5])
        )
        slots = max(self.source, self.target) + 2
        self.sides = [torch.randn(blocks, heads, slots) for _ in range(2)]
        self.from_bits, self.bits = from_bits, bits

    def _destinations(self, kind, ids, m):
        """A move's own pages, fresh ones, or those of the move before it, which has read them."""
        moves, s = self.src.shape
        fresh = ids[moves * s :].view(moves, m)
        if kind == "fresh" or s < m:
            return fresh
        return self.src[:, -m:] if kind == "own" else torch.cat([fresh[:1], self.src[:-1, -m:]])

    def _fill(self, cache, from_bits):
        pages, (_, heads, page, width) = self.src.flatten(), cache.shape
        sizes = 1 + torch.rand(2, len(pages), 1, self.source, 1)
        sides = torch.randn(2, len(pages), heads, self.source, width // 2) * sizes
        keys, values = sides + torch.randn(2, 1, 1, 1, width // 2)
        if from_bits < 16:
            return fill_cold(cache, pages, keys, values, from_bits, "rows")
        flat = [x.transpose(1, 2).flatten(0, 1) for x in (keys, values)]
        reference.write(*flat, cache, slots_of(pages, page, len(flat[0])), "rows")

    def check(self, op, expected_op, *options):
        """The op on all layers, against the reference on each."""
        expected = [(x.clone(), y.clone()) for x, y in zip(self.caches, self.sides, strict=True)]
        for (cache, side), scores in zip(expected, self.scores, strict=True):
            moves = self.src, self.dst, self.sinks
            expected_op(cache, *moves, *options, scores=scores, side=side, order="rows")
        op(
            self.caches,
            self.src,
            self.dst,
            self.sinks,
            *options,
            scores=self.scores,
            side=self.sides,
        )
        used = used_bytes(self.caches[0], self.bits)
        for cache, side, (then, side_then) in zip(self.caches, self.sides, expected, strict=True):
            assert torch.equal(side, side_then)
            self._check_pages(cache, then, used)

    def _check_pages(self, cache, then, used):
        """The same numbers in written pages (NaN and signs of zeros aside), else the same bytes."""
        written = torch.zeros(len(cache), dtype=torch.bool)
        written[self.dst.flatten()] = True
        a, b = (page_bytes(x.contiguous()) for x in (cache, then))
        assert torch.equal(a[~written], b[~written])
        if self.bits == 16:
            assert torch.equal(cache[written].nan_to_num(), then[written].nan_to_num())
            return
        codes = self.target * cache.shape[3] * self.bits // 8
        assert torch.equal(a[written, :, :codes], b[written, :, :codes])
        floats = [x[written, :, codes:used].contiguous().view(torch.float16) for x in (a, b)]
        assert torch.equal(*floats)


@st.composite
def collapses(draw):
    bits = draw(st.sampled_from([16, 8, 4]))
    return Layers(draw, draw(st.sampled_from([16, bits])), bits)


@st.composite
def drops(draw):
    bits = draw(st.sampled_from([8, 4]))
    return Layers(draw, bits, bits)


choices = st.tuples(st.sampled_from(["token", "block"]), st.sampled_from(["head", "layer"]))


@examples(25)
@given(collapses(), choices)
def test_collapse_by_given_scores(layers, choice):
    bits = layers.from_bits, layers.bits
    layers.check(ours.collapse, reference.collapse, "given", *choice, *bits)


@examples(15)
@given(drops())
def test_drop_by_given_scores(layers):
    layers.check(ours.drop, reference.drop, "given", layers.bits)


def random_cache(blocks, bits, dtype=torch.bfloat16):
    """Pages of some bits, full of tokens of different lengths."""
    cache = torch.empty(blocks, 2, 32, 160, dtype=dtype)
    tokens = cold_capacity(cache, bits)
    size = 1 + torch.rand(2, blocks, 2, tokens, 1)
    keys, values = torch.randn(2, blocks, 2, tokens, 80) * size
    fill_cold(cache, torch.arange(blocks), keys + torch.randn(80), values, bits, "rows")
    return cache


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("bits", [16, 8, 4])
def test_scores(policy, bits):
    torch.manual_seed(0)
    caches = [random_cache(7, bits), random_cache(7, bits)]
    src = torch.tensor([[5, 1, 2], [3, 6, 0]])
    found = token_scores(caches, src, policy, bits)
    for cache, scores in zip(caches, found, strict=True):
        sides = (x.transpose(1, 2).flatten(2, 3) for x in read_cold(cache, src, bits, "rows"))
        expected = SCORES[policy](*sides)
        torch.testing.assert_close(scores, expected.contiguous(), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("policy", ["entropykv", "norm"])
@pytest.mark.parametrize("scope", ["head", "layer"])
def test_collapse_by_policy(policy, scope):
    torch.manual_seed(1)
    caches = [random_cache(9, 16), random_cache(9, 16)]
    src, dst = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]]), torch.tensor([[1], [6]])
    choice = torch.tensor([4, 0]), policy, "token", scope, 16, 4
    expected = [cache.clone() for cache in caches]
    for cache in expected:
        reference.collapse(cache, src, dst, *choice, order="rows")
    ours.collapse(caches, src, dst, *choice)
    for cache, then in zip(caches, expected, strict=True):
        found, wanted = (read_cold(x, dst, 4, "rows") for x in (cache, then))
        assert torch.equal(torch.stack(found), torch.stack(wanted))


def test_a_later_move_reads_what_an_earlier_one_wrote():
    torch.manual_seed(2)
    cache = random_cache(9, 16)
    src, dst = torch.tensor([[1, 2, 3], [4, 5, 1], [6, 7, 2]]), torch.tensor([[1], [3], [8]])
    choice = torch.tensor([3, 0, 0]), "norm", "token", "head", 16, 16
    expected = cache.clone()
    reference.collapse(expected, src, dst, *choice, order="rows")
    ours.collapse([cache], src, dst, *choice)
    assert torch.equal(cache, expected)
    assert list(ours._independent(src, dst)) == [slice(0, 1), slice(1, 3)]


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("kind", ["halves", "large", "small", "equal", "odd"])
def test_quantization_is_exact(bits, kind):
    """Quotients half way between codes, the ends of float16, and what is no number."""
    torch.manual_seed(3)
    cache = torch.empty(9, 1, 64, 128, dtype=torch.float32)
    numbers = {
        "halves": torch.randint(-30, 31, (9, 1, 64, 128)) / 2.0,
        "large": torch.randn(9, 1, 64, 128) * FP16_MAX,
        "small": torch.randn(9, 1, 64, 128) * 1e-6,
        "equal": torch.full((9, 1, 64, 128), -0.3),
        "odd": torch.randn(9, 1, 64, 128),
    }
    cache.copy_(numbers[kind])
    if kind == "odd":
        for bad in (torch.nan, torch.inf, -torch.inf):
            cache[torch.rand(cache.shape) < 0.03] = bad
    keys, values = (x.flatten(0, 2) for x in read_pages(cache, torch.arange(8), "rows"))
    src, dst = torch.arange(8)[None], torch.tensor([[8]])
    scores = -torch.arange(len(keys)).float()[None, None, None]
    ours.collapse([cache], src, dst, torch.tensor([0]), "given", "token", "head", 16, bits, scores)
    tokens = cold_capacity(cache, bits)
    expected = torch.full_like(cache[:1], 0)
    fill_cold(
        expected,
        torch.tensor([0]),
        keys[None, None, :tokens],
        values[None, None, :tokens],
        bits,
        "rows",
    )
    used = used_bytes(cache, bits)
    codes = tokens * 128 * bits // 8
    a, b = page_bytes(cache[8:])[..., :used], page_bytes(expected)[..., :used]
    assert torch.equal(a[..., :codes], b[..., :codes])
    assert torch.equal(*(x[..., codes:].contiguous().view(torch.float16) for x in (a, b)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "best"}, "The policy 'best' is not one of"),
        ({"scores": torch.zeros(1, 1, 2, 3)}, "scores must be float32"),
        ({"bits": 5}, "bits must be 16, 8 or 4"),
    ],
)
def test_what_does_not_fit_is_refused(options, message):
    cache, page = random_cache(4, 16), torch.tensor([[1]])
    given = {"policy": "norm", "granularity": "token", "scope": "head", "from_bits": 16, "bits": 16}
    with pytest.raises(ValueError, match=message):
        ours.collapse([cache], page, page, torch.tensor([0]), **(given | options))
    with pytest.raises(ValueError, match="must be alike"):
        ours.drop([cache, cache.half()], page, page, torch.tensor([0]), "norm", 4)
