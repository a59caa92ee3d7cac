# SPDX-License-Identifier: Apache-2.0
"""Each score against its formula, and what all of them promise."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from entropykv_vllm.kernels.reduce import tree_sum
from entropykv_vllm.kernels.scores import SCORES

every_score = pytest.mark.parametrize("name", SCORES)
shapes = st.tuples(
    st.integers(1, 4), st.integers(1, 3), st.integers(1, 70), st.sampled_from([8, 80])
)
seeds = st.integers(0, 2**31)


def draw(shape, seed=0, dtype=torch.float32):
    """Keys that share a direction, as real ones do, and values."""
    generator = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, *shape, generator=generator)
    return (keys + 2 * torch.randn(shape[-1], generator=generator)).to(dtype), values.to(dtype)


def norm(x):
    return math.sqrt(sum(value * value for value in x))


FORMULAS = ("entropykv", "norm", "knorm", "keydiff", "sink", "window")


def naive(name, keys, values):
    """Scores of one head from lists of floats."""
    unit = [[x / norm(key) for x in key] for key in keys]
    mean = [sum(column) / len(unit) for column in zip(*unit, strict=True)]
    cosine = [sum(a * b for a, b in zip(key, mean, strict=True)) / norm(mean) for key in unit]
    if name == "norm":
        return [norm(value) / norm(key) for key, value in zip(keys, values, strict=True)]
    if name == "knorm":
        return [-norm(key) for key in keys]
    if name == "keydiff":
        return [-c for c in cosine]
    if name == "entropykv":
        alone = [(1 - c) * norm(value) for c, value in zip(cosine, values, strict=True)]
        near = [alone[max(0, i - 2) : i + 3] for i in range(len(alone))]
        return [sum(part) / len(part) for part in near]
    return [-float(i) for i in range(len(keys))]


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("tokens", [1, 2, 5, 33])
def test_equals_the_formula(name, tokens):
    keys, values = draw((2, tokens, 16))
    scores = SCORES[name](keys, values)
    expected = [naive(name, k, v) for k, v in zip(keys.tolist(), values.tolist(), strict=True)]
    torch.testing.assert_close(scores, torch.tensor(expected), atol=1e-4, rtol=1e-4)


@every_score
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_is_computed_in_float32(name, dtype):
    keys, values = draw((3, 2, 40, 16), dtype=dtype)
    scores = SCORES[name](keys, values)
    assert scores.dtype == torch.float32
    assert scores.shape == keys.shape[:-1]
    assert torch.equal(scores, SCORES[name](keys.float(), values.float()))


@every_score
@settings(deadline=None, max_examples=25)
@given(shape=shapes, seed=seeds)
def test_bits_do_not_depend_on_the_batch(name, shape, seed):
    keys, values = draw(shape, seed)
    together = SCORES[name](keys, values)
    for i in range(shape[0]):
        for h in range(shape[1]):
            alone = SCORES[name](keys[i : i + 1, h], values[i : i + 1, h])[0]
            assert torch.equal(together[i, h], alone)


@every_score
def test_bits_do_not_depend_on_threads_or_strides(name):
    keys, values = draw((8, 3, 512, 80))
    scores, threads = SCORES[name](keys, values), torch.get_num_threads()
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            columns = (x.mT.contiguous().mT for x in (keys[:1], values[:1]))
            assert torch.equal(scores[:1], SCORES[name](*columns))
    finally:
        torch.set_num_threads(threads)


@every_score
@pytest.mark.parametrize("scale", [0.0, 1e-45, 1e-30, 1.0, 1e30, 3e38])
def test_is_never_nan_for_finite_inputs(name, scale):
    keys, values = draw((2, 32, 16))
    finite = torch.finfo(torch.float32).max
    keys, values = ((x * scale).clamp(-finite, finite) for x in (keys, values))
    keys[0, 3:6] = 0
    values[1, ::2] = 0
    assert not SCORES[name](keys, values).isnan().any()


def test_pooling_does_not_favour_the_edges():
    """Equal tokens have equal scores, at the edges too."""
    keys, values = torch.ones(20, 8), torch.ones(20, 8)
    keys[:, ::2] = torch.tensor([1.0, -1.0]).repeat(10)[:, None]
    scores = SCORES["entropykv"](keys, values)
    torch.testing.assert_close(scores[0], scores[4:16].mean(), atol=0.1, rtol=0.1)
    torch.testing.assert_close(scores, scores.flip(0), atol=1e-5, rtol=1e-5)


def test_a_long_key_does_not_set_the_anchor():
    """KeyDiff's anchor is the mean of the unit keys: one huge key is one vote of many."""
    keys, values = draw((32, 16))
    keys[7] = -1000 * keys.mean(0)
    assert SCORES["keydiff"](keys, values).argmax() == 7


def test_random_is_well_mixed():
    keys, values = draw((4096, 64), dtype=torch.bfloat16)
    scores = SCORES["random"](keys, values)
    assert scores.min() >= 0
    assert scores.max() < 1
    assert len(scores.unique()) > 4080
    counts = torch.histc(scores, 16, 0, 1)
    assert ((counts - 256).square() / 256).sum() < 40  # chi squared, 15 degrees: p is about 5e-4
    for feature in (keys.float()[:, 0], keys.float().norm(dim=-1), torch.arange(4096.0)):
        assert torch.corrcoef(torch.stack([scores, feature]))[0, 1].abs() < 0.06


def test_random_changes_with_every_bit_and_place():
    keys, values = draw((64, 16), dtype=torch.bfloat16)
    scores = SCORES["random"](keys, values)
    for i in range(16):
        other = keys.clone()
        other.view(torch.int16)[:, i] ^= 1
        moved = SCORES["random"](other, values)
        assert (moved != scores).all()
        assert (moved - scores).abs().mean() > 0.2
    assert (SCORES["random"](keys.roll(1, -1), values) != scores).all()


@settings(deadline=None)
@given(shape=shapes, seed=seeds)
def test_tree_sum_adds_each_column_in_the_same_order(shape, seed):
    x, _ = draw(shape, seed)
    torch.testing.assert_close(tree_sum(x), x.sum(-2), atol=1e-4, rtol=1e-4)
    # torch.sum fails here: a share of 16 columns is added in another order than one of 80.
    for columns in (slice(0, 16), slice(-1, None)):
        assert torch.equal(tree_sum(x)[..., columns], tree_sum(x[..., columns]))
