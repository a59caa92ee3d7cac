# SPDX-License-Identifier: Apache-2.0
"""The ops in plain torch: attention against torch's own, collapse and drop against plain loops."""

import math
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from entropykv_vllm.kernels import formats, reference
from entropykv_vllm.kernels.layout import read_pages
from entropykv_vllm.kernels.scores import SCORES
from tests.kernels.paged import (
    DTYPES,
    batches,
    fill_cold,
    garbage,
    new_cache,
    slots_of,
    strided,
    used_bytes,
)

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


def same_bytes(a, b):
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def contiguous_tokens(batch, request):
    """Keys and values ``[heads, tokens, dim]`` of a request, page by page from the bytes."""
    page = batch.cache.shape[2]
    cold, hot = int(batch.cold[request]), int(batch.hot[request])
    keys, values = [], []
    for entry, block in enumerate(batch.table[request].tolist()):
        left = hot - (entry - cold) * page
        if entry < cold:
            sides = formats.read_cold(batch.cache, torch.tensor([block]), batch.bits)
        elif left > 0:
            sides = (x[:, :, :left] for x in read_pages(batch.cache, torch.tensor([block])))
        else:
            break
        for side, found in zip(sides, (keys, values), strict=True):
            found.append(side[0].float())
    return torch.cat(keys, 1), torch.cat(values, 1)


def torch_attention(batch, request):
    """torch's attention; a sink is one more token without a key and a value."""
    query = batch.query[slice(*batch.starts[request : request + 2].tolist())].transpose(0, 1)
    keys, values = (
        torch.cat([x, torch.zeros_like(x[:, :1])], 1).repeat_interleave(len(query) // len(x), 0)
        for x in contiguous_tokens(batch, request)
    )
    new, tokens = query.shape[1], keys.shape[1] - 1
    bias = torch.zeros(len(query), new, tokens + 1)
    future = torch.arange(tokens) > torch.arange(tokens - new, tokens)[:, None]
    bias[:, :, :tokens].masked_fill_(future, -torch.inf)
    bias[:, :, tokens] = -torch.inf if batch.sinks is None else batch.sinks[:, None]
    mixed = scaled_dot_product_attention(
        query.float(), keys, values, attn_mask=bias, scale=batch.scale
    )
    return mixed.transpose(0, 1)


@settings(deadline=None, max_examples=60)
@given(batches(shared=st.booleans()), st.sampled_from([1, 1 << 10, reference.LOGITS]))
def test_attention_is_that_of_torch(batch, logits):
    batch.softcap = 0.0
    with mock.patch.object(reference, "LOGITS", logits):
        output = batch.run(reference.attention)
    for request, (start, end) in enumerate(zip(batch.starts, batch.starts[1:], strict=False)):
        if start < end:
            expected = torch_attention(batch, request).to(batch.query.dtype).float()
            tolerance = TOLERANCE[batch.query.dtype]
            torch.testing.assert_close(
                output[start:end].float(), expected, atol=tolerance, rtol=tolerance
            )


def dense_softmax(batch, request, first):
    """What the rows of a request from ``first`` on give to its tokens: ``[heads, tokens]``."""
    start, end = batch.starts[request : request + 2].tolist()
    if start == end:
        return torch.zeros(batch.cache.shape[1], 0)
    query = batch.query[start:end].double()
    keys = contiguous_tokens(batch, request)[0].double()
    total = torch.zeros(keys.shape[:2], dtype=torch.double)
    group = query.shape[1] // len(keys)
    for r in range(max(first, 0), len(query)):
        for head, q in enumerate(query[r]):
            seen = keys[head // group, : keys.shape[1] - len(query) + 1 + r]
            logits = seen @ q * batch.scale
            if batch.softcap:
                logits = batch.softcap * (logits / batch.softcap).tanh()
            sink = 0 if batch.sinks is None else batch.sinks[head].double().exp()
            weights = logits.exp()
            total[head // group, : len(seen)] += weights / (weights.sum() + sink) / group
    return total


@settings(deadline=None, max_examples=60)
@given(batches(shared=st.booleans()), st.sampled_from([1, 1 << 10, reference.LOGITS]))
def test_observe_adds_a_dense_softmax(batch, logits):
    requests, mass = len(batch.cold), batch.new_mass(2.0)
    first, fresh = torch.randint(-1, 22, (requests,)), torch.randint(2, (requests,))
    expected = mass.clone()
    for request in range(requests):
        places = batch.slots(request)
        for page, place in places if fresh[request] else []:
            expected[page, :, place] = 0.0
        weights = dense_softmax(batch, request, int(first[request])).T
        for (page, place), weight in zip(places, weights, strict=False):
            expected[page, :, place] += weight
    with mock.patch.object(reference, "LOGITS", logits):
        batch.observe(reference.observe, mass, first.int(), fresh.int())
    torch.testing.assert_close(mass, expected, atol=1e-4, rtol=1e-4, equal_nan=True)


def shared_page():
    """Two requests whose only page is the same, of three tokens that are alike."""
    cache, ones = torch.zeros(2, 1, 16, 32), torch.ones(3, 1, 16)
    reference.write(ones, ones, cache, torch.arange(16, 19))
    starts, table = torch.tensor([0, 1, 2]).int(), torch.tensor([[1], [1]]).int()
    cold, hot = torch.tensor([0, 0]).int(), torch.tensor([3, 3]).int()
    return ones[:2], cache, starts, table, cold, hot


def test_requests_that_share_a_page_both_add_to_it():
    query, cache, *batch = shared_page()
    mass, both = torch.full((2, 1, 16), torch.nan), torch.tensor([1, 1]).int()
    reference.observe(query, cache, mass, *batch, 16, 1.0, 0.0, None, 0 * both, both)
    torch.testing.assert_close(mass[1, 0], torch.tensor([2 / 3] * 3 + [0.0] * 13))
    assert mass[0].isnan().all()


@pytest.mark.parametrize(
    "mass", [torch.zeros(2, 1, 15), torch.zeros(2, 2, 16), torch.zeros(2, 1, 16).double()]
)
def test_a_table_that_does_not_fit_the_cache_is_refused(mass):
    query, cache, *batch = shared_page()
    zero = torch.tensor([0, 0]).int()
    with pytest.raises(ValueError, match="mass must be float32"):
        reference.observe(query, cache, mass, *batch, 16, 1.0, 0.0, None, zero, zero)
    src, dst = torch.tensor([[0, 1]]), torch.tensor([[1]])
    with pytest.raises(ValueError, match="side must be float32"):
        reference.drop(cache, src, dst, zero[:1], "norm", 16, side=mass)


def test_softcap_bounds_the_logits_but_not_the_sinks():
    cache = torch.zeros(2, 1, 16, 32)
    keys, values = torch.randn(2, 3, 1, 16)
    reference.write(keys, values, cache, torch.arange(16, 19))
    query, sink = 20 * torch.randn(1, 1, 16), 2.5
    output = torch.empty_like(query)
    one, none, three = torch.tensor([[1]]), torch.tensor([0]), torch.tensor([3])
    starts, sinks = torch.tensor([0, 1]), torch.tensor([sink])
    reference.attention(query, cache, output, starts, one, none, three, 16, 0.5, 2.0, sinks)
    logits = [2.0 * torch.tanh((query[0, 0] @ key[0]) * 0.5 / 2.0) for key in keys]
    weights = torch.tensor([*logits, sink]).exp()
    expected = sum(w * value[0] for w, value in zip(weights, values, strict=False))
    torch.testing.assert_close(output[0, 0], expected / weights.sum())


def test_query_heads_must_share_heads_evenly():
    cache, query = torch.zeros(2, 2, 16, 32), torch.zeros(1, 3, 16)
    one = torch.tensor([1])
    with pytest.raises(ValueError, match="3 query heads cannot share 2 KV heads"):
        reference.attention(
            query, cache, query, torch.tensor([0, 1]), one[:, None], one, one, 16, 1.0, 0.0, None
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shared", [False, True])
def test_write_touches_its_slots_only(dtype, shared):
    cache = new_cache(5, 2, 16, 48, dtype, "noise", shared)
    before = read_pages(cache, torch.arange(5))
    slots = torch.tensor([17, -1, 79, 32, -5, 20, 33])
    new = torch.randn(2, 7, 2, 48)
    reference.write(*(strided(x, True) for x in new), cache, slots)
    for old, now, tokens in zip(before, read_pages(cache, torch.arange(5)), new, strict=True):
        for slot, token in zip(slots.tolist(), tokens, strict=True):
            if slot >= 0:
                old[slot // 16, :, slot % 16] = token.to(dtype)
        assert same_bytes(now, old)


def naive_best(scores, keep, protect):
    """Indices of the best, ties to the earlier, in order of position."""
    rank = sorted(range(len(scores)), key=lambda i: (i >= protect, -scores[i] * (i >= protect), i))
    return sorted(rank[:keep])


@settings(deadline=None, max_examples=40)
@given(
    dtype=st.sampled_from(DTYPES),
    bits=st.sampled_from([16, 8, 4]),
    policy=st.sampled_from(list(SCORES)),
    m=st.integers(1, 2),
    sinks=st.integers(0, 20),
    fresh=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_collapse_keeps_the_best_tokens_of_each_head(dtype, bits, policy, m, sinks, fresh, seed):
    torch.manual_seed(seed)
    heads, page, dim = 2, 16, 48
    cache = new_cache(40, heads, page, dim, dtype, "nan", True)
    tokens = m * formats.cold_capacity(cache, bits)
    order = torch.randperm(40)
    src, length = order[: tokens // page + 2], tokens + 2 * page
    keys, values = torch.randn(2, length, heads, dim).to(dtype)
    reference.write(keys, values, cache, slots_of(src, page, length))
    dst = order[-m:] if fresh else src[1 : 1 + m]
    new = cache.clone()
    reference.collapse(
        new, src[None], dst[None], torch.tensor([sinks]), policy, "token", "head", 16, bits
    )

    read = [x.transpose(0, 1).flatten(1, 2) for x in formats.read_cold(new, dst, bits)]
    for h in range(heads):
        scores = SCORES[policy](keys[:, h], values[:, h]).tolist()
        best = naive_best(scores, tokens, sinks)
        for side, old in zip(read, (keys, values), strict=True):
            error = (side[h].float() - old[best, h].float()).abs().max()
            assert error < {4: 0.5, 8: 0.04, 16: 1e-9}[bits]
    others = [i for i in range(40) if i not in dst]
    assert same_bytes(new[others], cache[others])


def test_moves_are_carried_out_one_after_another():
    """The second move reads what the first one wrote."""
    cache = torch.randn(8, 2, 16, 64)
    src, dst = torch.tensor([[1, 2, 3], [4, 5, 1]]), torch.tensor([[1], [4]])
    sinks = torch.tensor([3, 0])
    together, alone = cache.clone(), cache.clone()
    reference.collapse(together, src, dst, sinks, "norm", "block", "layer", 16, 16)
    for i in range(2):
        part = src[i : i + 1], dst[i : i + 1], sinks[i : i + 1]
        reference.collapse(alone, *part, "norm", "block", "layer", 16, 16)
    assert same_bytes(together, alone)


@settings(deadline=None, max_examples=40)
@given(
    dtype=st.sampled_from(DTYPES),
    bits=st.sampled_from([8, 4]),
    policy=st.sampled_from(list(SCORES)),
    counts=st.integers(1, 5).flatmap(lambda s: st.tuples(st.just(s), st.integers(1, s))),
    sinks=st.sampled_from([0, 1, 48, 49, 1000]),
    fresh=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_drop_copies_the_best_pages_of_each_head(dtype, bits, policy, counts, sinks, fresh, seed):
    torch.manual_seed(seed)
    s, m = counts
    cache = new_cache(12, 3, 32, 32, dtype, "nan", False)
    order = torch.randperm(12)
    src, dst = order[:s], order[-m:] if fresh else order[:m].flip(0)
    tokens = formats.cold_capacity(cache, bits)
    # Pages of different sizes, so that no two are as good as each other.
    size = 1 + torch.rand(2, s, 3, 1, 1)
    fill_cold(cache, src, *(torch.randn(2, s, 3, tokens, 32) * size), bits)
    new = cache.clone()
    reference.drop(new, src[None], dst[None], torch.tensor([sinks]), policy, bits)

    keys, values = formats.read_cold(cache, src, bits)
    old_bytes, new_bytes = formats.page_bytes(cache), formats.page_bytes(new)
    used = used_bytes(cache, bits)
    for h in range(3):
        scores = SCORES[policy](keys[:, h].flatten(0, 1), values[:, h].flatten(0, 1))
        means = scores.view(s, -1).double().mean(-1).tolist()
        best = naive_best(means, m, -(-sinks // tokens))
        assert torch.equal(new_bytes[dst, h, :used], old_bytes[src[best], h, :used])
    others = [i for i in range(12) if i not in dst]
    assert same_bytes(new[others], cache[others])


def naive_choice(scores, keep, protect):
    """`naive_best` of scores that may be NaN, which is worse than every number."""
    numbers = [s for s in scores if not math.isnan(s)]
    order = {s: i + 1.0 for i, s in enumerate(sorted(set(numbers)))}
    return naive_best([order.get(s, 0.0) for s in scores], keep, protect)


@settings(deadline=None, max_examples=60)
@given(
    from_bits=st.sampled_from([16, 8, 4]),
    bits=st.sampled_from([16, 8, 4]),
    sinks=st.integers(0, 60),
    seed=st.integers(0, 2**31),
)
def test_given_scores_decide_and_numbers_go_with_their_tokens(from_bits, bits, sinks, seed):
    """One move of collapse; few scores differ, so most choices are among equals."""
    torch.manual_seed(seed)
    cache = new_cache(12, 2, 32, 32, torch.float16, "nan", False)
    source, target = (formats.cold_capacity(cache, b) for b in (from_bits, bits))
    src, dst = torch.arange(target // source + 2, 0, -1), torch.tensor([2])
    keys, values = torch.randn(2, len(src), 2, source, 32)
    fill_cold(cache, src, keys, values, from_bits)
    keys, values = (x.transpose(0, 1).flatten(1, 2) for x in (keys, values))
    scores = torch.tensor([0.0, 1.0, 2.0, torch.inf, -torch.inf, torch.nan])
    scores = scores[torch.randint(6, (1, *keys.shape[:2]))]
    side, number = torch.full((12, 2, max(source, target) + 1), torch.nan), torch.rand(scores.shape)
    side[src, :, :source] = number[0].unflatten(1, (len(src), source)).transpose(0, 1)
    expected = side.clone()
    args = src[None], dst[None], torch.tensor([sinks]), "any", "token", "head", from_bits, bits
    reference.collapse(cache, *args, scores, side)

    written = formats.read_cold(cache, dst, bits)
    for h in range(2):
        best = naive_choice(scores[0, h].tolist(), target, sinks)
        expected[dst, h, :target] = number[0, h, best]
        for new, old in zip(written, (keys, values), strict=True):
            error = (new[0, h].float() - old[h, best]).abs().max()
            assert error < {4: 0.7, 8: 0.06, 16: 2e-3}[min(bits, from_bits)]
    torch.testing.assert_close(side, expected, atol=0, rtol=0, equal_nan=True)


@settings(deadline=None, max_examples=40)
@given(bits=st.sampled_from([16, 8, 4]), sinks=st.integers(0, 200), seed=st.integers(0, 2**31))
def test_given_scores_decide_which_pages_are_dropped(bits, sinks, seed):
    torch.manual_seed(seed)
    cache = new_cache(9, 2, 32, 32, torch.float16, "noise", False)
    tokens, src, dst = (
        formats.cold_capacity(cache, bits),
        torch.arange(6, 1, -1),
        torch.tensor([3, 8]),
    )
    means = torch.tensor([0.0, 1.0, -torch.inf, torch.nan])[torch.randint(4, (2, 5))]
    scores = means.repeat_interleave(tokens, 1)[None]
    side, after = torch.rand(9, 2, tokens + 1), cache.clone()
    kept = side.clone()
    reference.drop(after, src[None], dst[None], torch.tensor([sinks]), "any", bits, scores, kept)
    for h in range(2):
        best = src[naive_choice(means[h].tolist(), 2, -(-sinks // tokens))]
        assert same_bytes(after[dst, h], cache[best, h])
        assert torch.equal(kept[dst, h, :tokens], side[best, h, :tokens])
    others = [i for i in range(9) if i not in dst]
    assert torch.equal(kept[others], side[others])
    assert torch.equal(kept[dst, :, tokens:], side[dst, :, tokens:])


def test_given_scores_must_fit_the_moves():
    cache, one = torch.zeros(3, 1, 16, 32), torch.tensor([[1]])
    for scores in (torch.zeros(1, 1, 32), torch.zeros(2, 1, 16), torch.zeros(1, 1, 16).double()):
        with pytest.raises(ValueError, match=r"scores must be float32 \(1, 1, 16\)"):
            reference.drop(cache, one, one, one[0], "norm", 16, scores)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "best"}, "'best' is not one of entropykv, norm"),
        ({"bits": 2}, "bits must be 16, 8 or 4, not 2"),
        ({"granularity": "page"}, "granularity must be"),
        ({"scope": "model"}, "scope must be"),
        ({"dst": torch.tensor([[1, 2, 3]])}, "keep must be 1 to 32 tokens, not 48"),
    ],
)
def test_what_cannot_be_collapsed_is_refused(options, message):
    known = {
        "src": torch.tensor([[1, 2]]),
        "dst": torch.tensor([[1]]),
        "sinks": torch.tensor([0]),
        "policy": "norm",
        "granularity": "token",
        "scope": "head",
        "from_bits": 16,
        "bits": 16,
    }
    with pytest.raises(ValueError, match=message):
        reference.collapse(garbage((4, 1, 16, 64), torch.float32, "nan"), **(known | options))
