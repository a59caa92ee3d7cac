# SPDX-License-Identifier: Apache-2.0
"""The collapse against a plain loop over tokens, on pages that hold garbage elsewhere."""

from dataclasses import dataclass
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from entropykv_vllm.kernels import collapse as module
from entropykv_vllm.kernels.collapse import collapse
from entropykv_vllm.kernels.layout import read_pages, write_pages
from entropykv_vllm.kernels.scores import SCORES
from entropykv_vllm.kernels.select import select

HEAD_SIZE = 32


@dataclass
class Case:
    caches: list[torch.Tensor]
    src: torch.Tensor
    dst: torch.Tensor
    options: dict

    def run(self, caches, moves=slice(None)):
        options = dict(self.options, sinks=self.options["sinks"][moves])
        collapse(caches, self.src[moves], self.dst[moves], **options)
        return caches

    def clones(self):
        return [cache.clone() for cache in self.caches]


@st.composite
def cases(draw, isas=("vec", "vec16", "amx")):
    n, s = draw(st.integers(1, 4)), draw(st.integers(2, 5))
    m = draw(st.integers(1, s - 1))
    heads, block_size = draw(st.integers(1, 3)), draw(st.sampled_from([32, 64]))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    pages = draw(st.permutations(range(1, 2 * n * s + 1)))
    src = torch.tensor(pages[: n * s]).view(n, s)
    # In place, in pages that another move reads, in fresh pages, or in a mixture of all.
    pool = {
        "own": pages[: n * s],
        "others": src.roll(1, 0).flatten().tolist(),
        "fresh": pages[n * s :],
    }
    kind = draw(st.sampled_from([*pool, "mixed"]))
    if kind == "mixed":
        dst = torch.tensor(draw(st.permutations(pages))[: n * m]).view(n, m)
    else:
        dst = torch.tensor(pool[kind]).view(n, s)[:, :m]
    torch.manual_seed(draw(st.integers(0, 2**31)))
    caches = [
        torch.full((2 * n * s + 1, heads, block_size, 2 * HEAD_SIZE), torch.nan, dtype=dtype)
        for _ in range(draw(st.integers(1, 4)))
    ]
    isa = draw(st.sampled_from(isas))
    for cache in caches:
        keys, values = torch.randn(2, n, s, heads, block_size, HEAD_SIZE).to(dtype)
        if draw(st.booleans()):  # all tokens alike
            keys, values = torch.ones_like(keys), torch.ones_like(values)
        write_pages(cache, src, keys, values, isa)
    options = {
        "score": SCORES[draw(st.sampled_from(list(SCORES)))],
        "sinks": draw(st.lists(st.integers(0, m * block_size), min_size=n, max_size=n)),
        "isa": isa,
        "granularity": draw(st.sampled_from(["token", "block"])),
        "scope": draw(st.sampled_from(["head", "layer"])),
    }
    return Case(caches, src, dst, options)


def naive(case):
    """Token by token, one move and layer at a time, from a copy of the old caches."""
    options = dict(case.options)
    score, sinks, isa = options.pop("score"), options.pop("sinks"), options.pop("isa")
    new = case.clones()
    for old, cache in zip(case.caches, new, strict=True):
        block_size = cache.shape[2]
        for src, dst, protect in zip(case.src, case.dst, sinks, strict=True):
            keys, values = read_pages(old, src, isa)
            tokens = [(page, t) for page in range(len(src)) for t in range(block_size)]
            all_keys, all_values = (
                torch.stack([side[page, :, t] for page, t in tokens], 1) for side in (keys, values)
            )
            best = select(
                score(all_keys, all_values), len(dst) * block_size, protect=protect, **options
            )
            new_keys, new_values = read_pages(cache, dst, isa)
            for head, kept in enumerate(best.tolist()):
                for place, token in enumerate(kept):
                    page, t = divmod(place, block_size)
                    new_keys[page, head, t] = all_keys[head, token]
                    new_values[page, head, t] = all_values[head, token]
            write_pages(cache, dst, new_keys, new_values, isa)
    return new


def assert_same(caches, expected):
    """Bit for bit, with NaN equal to NaN."""
    for cache, other in zip(caches, expected, strict=True):
        assert torch.equal(cache.view(torch.uint8), other.view(torch.uint8))


@settings(deadline=None, max_examples=100)
@given(cases(), st.sampled_from([1, 1 << 16, 4 << 20]))
def test_equals_a_plain_loop(case, chunk_bytes):
    """Whatever is read at once; what is not in ``src`` holds NaN and is left as it is."""
    expected = naive(case)
    with mock.patch.object(module, "CHUNK_BYTES", chunk_bytes):
        assert_same(case.run(case.clones()), expected)
    read = torch.cat([torch.stack(read_pages(c, case.dst, case.options["isa"])) for c in expected])
    assert not read.isnan().any()


@settings(deadline=None, max_examples=40)
@given(cases())
def test_moves_may_be_batched(case):
    """One by one, each on the old caches, the moves write the same bits."""
    together = case.run(case.clones())
    for i in range(len(case.src)):
        alone = case.run(case.clones(), moves=slice(i, i + 1))
        for cache, other in zip(together, alone, strict=True):
            assert torch.equal(cache[case.dst[i]], other[case.dst[i]])


@settings(deadline=None, max_examples=40)
@given(cases(isas=("vec",)))
def test_survivors_are_sinks_and_whole_tokens_in_order(case):
    """Tokens are marked by their position: nothing is torn, doubled or out of order."""
    n, s = case.src.shape
    heads, block_size = case.caches[0].shape[1:3]
    position = torch.arange(s * block_size).view(s, 1, block_size, 1)
    marks = (position // 16 + 1).expand(n, s, heads, block_size, HEAD_SIZE).clone()
    marks[..., 0] = position[..., 0] % 16 + 1
    for cache in case.caches:
        write_pages(cache, case.src, marks.to(cache.dtype), marks.to(cache.dtype), "vec")
    for cache in case.run(case.clones()):
        keys, values = (side.float() for side in read_pages(cache, case.dst, "vec"))
        assert torch.equal(keys, values)
        found = ((keys[..., 1] - 1) * 16 + keys[..., 0] - 1).transpose(1, 2).flatten(2)
        assert (found.diff() > 0).all()
        for move, sinks in zip(found, case.options["sinks"], strict=True):
            assert (move[:, :sinks] == torch.arange(sinks)).all()


def test_a_score_of_garbage_still_fills_the_pages():
    """NaN inside ``src``: a broken segment stays a whole number of pages, sinks in front."""
    cache = torch.full((4, 2, 32, 64), torch.nan)
    cache[3] = 7.0
    src, dst = torch.tensor([[1, 2]]), torch.tensor([[1]])
    collapse([cache], src, dst, score=SCORES["norm"], sinks=[4], isa="vec")
    assert (cache[3] == 7).all()
    assert cache[2].isnan().all()


def test_nothing_to_do():
    cache = torch.ones(2, 1, 32, 64)
    none = torch.empty(0, 4, dtype=torch.int64)
    collapse([cache], none, none[:, :2], score=SCORES["norm"], sinks=[], isa="vec")
    assert (cache == 1).all()


@pytest.mark.parametrize(
    ("src", "dst", "sinks", "message"),
    [
        ([[1, 2]], [[1, 2]], [0], "2 pages cannot be collapsed into 2"),
        ([[1, 2]], [[]], [0], "2 pages cannot be collapsed into 0"),
        ([[1, 2]], [[1], [2]], [0], "one row per move"),
        ([[1, 2]], [[1]], [0, 0], "one row per move"),
        ([1, 2], [1], [0], "one row per move"),
    ],
)
def test_moves_that_make_no_sense_are_refused(src, dst, sinks, message):
    cache = torch.zeros(3, 1, 32, 64)
    src, dst = torch.tensor(src), torch.tensor(dst, dtype=torch.int64)
    with pytest.raises(ValueError, match=message):
        collapse([cache], src, dst, score=SCORES["norm"], sinks=sinks, isa="vec")
