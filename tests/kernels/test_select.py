# SPDX-License-Identifier: Apache-2.0
"""Selection against plain Python, with ties, NaN, infinities and protected tokens."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from entropykv_vllm.kernels.select import select

# Few values, so that most cases have ties.
values = st.sampled_from([-math.inf, -2.0, -0.0, 0.0, 1.0, 1.5, math.inf, math.nan])
numbers = st.floats(-100, 100, width=32)


def naive(scores, keep, protect):
    """Indices of one head from a list of floats."""

    def rank(i):
        if i < protect:
            return (0, 0, i)
        return (2, 0, i) if math.isnan(scores[i]) else (1, -scores[i], i)

    return sorted(sorted(range(len(scores)), key=rank)[:keep])


def runs(scores, length):
    return torch.tensor(scores).view(-1, length).mean(-1).tolist()


@st.composite
def scored(draw, element=values, block=1):
    """Scores ``[moves, heads, tokens]``, how many to keep and to protect."""
    moves, heads = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    tokens = block * draw(st.integers(1, 40 // block))
    flat = draw(st.lists(element, min_size=tokens * heads, max_size=tokens * heads))
    scores = torch.tensor(flat).view(1, heads, tokens).repeat(moves, 1, 1)
    scores[1:] = scores[1:].flip(-1)
    protect = draw(st.lists(st.integers(0, tokens), min_size=moves, max_size=moves))
    return scores, draw(st.integers(1, tokens)), protect


@settings(deadline=None)
@given(scored())
def test_tokens(case):
    scores, keep, protect = case
    best = select(scores, keep, protect=torch.tensor(protect))
    assert best.dtype == torch.int64
    for i, move in enumerate(scores.tolist()):
        for h, head in enumerate(move):
            assert best[i, h].tolist() == naive(head, keep, protect[i])


@settings(deadline=None)
@given(scored(block=4))
def test_blocks(case):
    scores, keep, protect = case
    run = math.gcd(4, keep)
    best = select(scores, keep, protect=torch.tensor(protect), granularity="block", block=4)
    for i, move in enumerate(scores.tolist()):
        for h, head in enumerate(move):
            kept = naive(runs(head, run), keep // run, -(-protect[i] // run))
            assert best[i, h].tolist() == [t for r in kept for t in range(r * run, (r + 1) * run)]


@settings(deadline=None)
@given(scored(), st.sampled_from(["head", "layer"]), st.sampled_from(["token", "block"]))
def test_batches_do_not_matter(case, scope, granularity):
    scores, keep, protect = case
    options = {"scope": scope, "granularity": granularity, "block": 1}
    together = select(scores, keep, protect=torch.tensor(protect), **options)
    alone = [select(s, keep, protect=p, **options) for s, p in zip(scores, protect, strict=True)]
    assert torch.equal(together, torch.stack(alone))


@settings(deadline=None)
@given(scored(element=numbers))
def test_layer_scope_keeps_the_largest_sums(case):
    """Compared by what they are worth: sums that differ in rounding only may trade places."""
    scores, keep, protect = case
    best = select(scores, keep, protect=torch.tensor(protect), scope="layer")
    assert (best == best[:, :1]).all(), "heads do not agree"
    double = scores.double()
    centred = double - double.mean(-1, keepdim=True)
    flat = double.amax(-1, keepdim=True) == double.amin(-1, keepdim=True)
    worth = (centred / centred.square().mean(-1, keepdim=True).sqrt().where(~flat, 1)).sum(1)
    for i in range(len(scores)):
        expected = naive(worth[i].tolist(), keep, protect[i])
        kept = set(best[i, 0].tolist())
        assert set(range(min(protect[i], keep))) <= kept
        difference = worth[i][expected].sum() - worth[i][sorted(kept)].sum()
        assert difference.abs() < 1e-2


def test_layer_scope_gives_each_head_the_same_say():
    quiet = torch.tensor([0.0, 0.0, 0.3, 0.0, 0.2, 0.0])
    loud = torch.tensor([99.0, 0.0, 0.0, 0.0, 0.0, 0.0]).roll(1) + 1000
    assert select(torch.stack([quiet, loud]), 2, scope="layer").tolist() == [[1, 2], [1, 2]]


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_layer_scope_drops_only_the_token_that_is_bad(bad):
    scores = torch.tensor([[3.0, 1.0, 2.0, 5.0], [1.0, 1.0, 2.0, 9.0]])
    scores[0, 3] = bad
    assert select(scores, 2, scope="layer").tolist() == [[0, 2], [0, 2]]
    scores[0, 3], scores[1, 3] = math.inf, -math.inf
    assert select(scores, 3, scope="layer").tolist() == [[0, 1, 2]] * 2


@pytest.mark.parametrize("fill", [0.0, math.inf, -math.inf, math.nan])
def test_protected_tokens_stay_among_equals(fill):
    scores = torch.full((2, 32), fill)
    for options in ({}, {"scope": "layer"}, {"granularity": "block"}):
        assert select(scores, 16, protect=4, **options).tolist() == [list(range(16))] * 2
    scores[:, 4:] = math.inf
    assert select(scores, 5, protect=4).tolist() == [[0, 1, 2, 3, 4]] * 2


def test_a_run_with_one_protected_token_stays():
    scores = torch.arange(32.0).view(1, 32)
    best = select(scores, 16, protect=1, granularity="block", block=8)
    assert best.tolist() == [[*range(8), *range(24, 32)]]


def test_more_protected_than_kept_keeps_the_first():
    assert select(torch.arange(8.0).view(1, 8), 3, protect=8).tolist() == [[0, 1, 2]]


@pytest.mark.parametrize(
    ("keep", "options", "message"),
    [
        (0, {}, "keep must be 1 to 32 tokens, not 0"),
        (33, {}, "keep must be 1 to 32 tokens, not 33"),
        (4, {"granularity": "page"}, "granularity must be 'token' or 'block', not 'page'"),
        (4, {"scope": "model"}, "scope must be 'head' or 'layer', not 'model'"),
        (4, {"granularity": "block", "block": 12}, "block must divide the 32 tokens, 12 does not"),
    ],
)
def test_what_cannot_be_selected_is_refused(keep, options, message):
    with pytest.raises(ValueError, match=message):
        select(torch.zeros(1, 32), keep, **options)
