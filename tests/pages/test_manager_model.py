# SPDX-License-Identifier: Apache-2.0
"""The page manager under random load, held to a model of the workers' memory at each step."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entropykv_vllm.plan.request import AS_SERVED, Control, joined
from entropykv_vllm.plan.schedule import (
    TierPlan,
    boundary,
    held_pages,
    held_tokens,
    peak_pages,
)

from .model import Engine
from .tiers import PAGE, TIERS, tiers

QUANTIZED = [name for name in TIERS if name.startswith("quantized")]


def tokens(family: int, length: int) -> list[int]:
    """Prompts of a family share their prefix, to any length."""
    return [
        (position * 31 + family * 1000 * (position > 40)) % 50_000 for position in range(length)
    ]


@pytest.mark.parametrize("name", TIERS)
@pytest.mark.parametrize("caching", [True, False])
@given(seed=st.integers(0, 1 << 30), slack=st.sampled_from([0, 3, 10, 40, 300]))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_every_page_holds_what_the_plan_says(name, caching, seed, slack):
    """A long run in a pool that barely holds one to a few requests."""
    _run(TIERS[name], caching, seed, slack)


@given(tiers(), st.booleans(), st.integers(0, 1 << 30), st.sampled_from([0, 3, 10, 40, 300]))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_every_page_of_any_tiers_holds_what_the_plan_says(plans, caching, seed, slack):
    _run(plans, caching, seed, slack)


@given(tiers(), st.booleans(), st.integers(0, 1 << 30), st.sampled_from([0, 3, 10, 40, 300]))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_requests_that_ask_for_different_things_live_side_by_side(plans, caching, seed, slack):
    whole = sum(-(-230 // plan.page) for plan in plans)
    _run(plans, caching, seed, slack, least=whole, ask=_wish)


def _wish(rng: random.Random) -> Control:
    spans = [(first, first + rng.randint(1, 60)) for first in rng.sample(range(200), 2)]
    protect = joined(spans[: rng.randint(0, 2)])
    return rng.choice(
        [AS_SERVED, Control(off=True), Control(keep=rng.choice([0.3, 1, 2]), protect=protect)]
    )


def _run(
    plans: list[TierPlan], caching: bool, seed: int, slack: int, least=0, ask=lambda rng: AS_SERVED
) -> None:
    rng = random.Random(seed)
    pages = 1 + max(least, sum(peak_pages(plan, 230) for plan in plans)) + slack
    engine = Engine(plans, pages, caching, choose_victim=rng.choice)
    for number in range(150):
        _act(engine, rng, f"r{number % 11}", ask)
    for request in engine.running + engine.waiting:
        engine.abort(request)
    assert engine.pool.get_num_free_blocks() == engine.pool.num_gpu_blocks - 1, "pages leaked"
    for tier in engine.tiers:
        kept = [tier.progress, tier._whole, tier._stuck, tier._unhashed, tier._unwritten]
        assert not any(kept), "something of a request is kept that is gone"


def _act(engine: Engine, rng: random.Random, name: str, ask) -> None:
    active = engine.running + engine.waiting
    event = rng.random()
    if event < 0.25 and all(request.request_id != name for request in active):
        engine.add(name, tokens(rng.randrange(3), rng.randint(1, 200)), ask(rng))
    elif event < 0.3 and active:
        engine.abort(rng.choice(active))
        engine.check()
    elif event < 0.31 and not engine.running:
        engine.manager.reset_prefix_cache()
    elif event < 0.4 and (answered := [r for r in engine.running if engine.is_read(r)]):
        request = rng.choice(answered)
        engine.extend(request, tokens(0, rng.randint(1, max(1, 220 - request.num_tokens))))
    for request in list(engine.running):
        if request.num_tokens >= 230:
            engine.abort(request)
    engine.step(budget=rng.choice([1, 7, 40, 1000]))


def run_to(engine: Engine, length: int, budget: int) -> None:
    while any(r.num_computed_tokens < length for r in engine.running) or engine.waiting:
        engine.step(budget)


def read_and_leave(engine: Engine) -> None:
    """A prompt of 290 tokens is read to its end, and its request goes away."""
    first = engine.add("first", tokens(0, 290))
    run_to(engine, 290, 64)
    engine.abort(first)


@pytest.mark.parametrize("budget", [3, 32, 70, 10_000])
@pytest.mark.parametrize("name", TIERS)
def test_the_state_does_not_depend_on_the_chunks(name, budget):
    engine = Engine(TIERS[name], 2000)
    request = engine.add("r", tokens(0, 290))
    run_to(engine, 290, budget)
    tables = [tier.req_to_blocks["r"] for tier in engine.tiers]
    content = [[engine.memory.content.get(b.block_id) for b in table[:72]] for table in tables]
    other = Engine(TIERS[name], 2000)
    other.add("r", tokens(0, 290))
    run_to(other, 290, 17)
    expected = [
        [other.memory.content.get(b.block_id) for b in tier.req_to_blocks["r"][:72]]
        for tier in other.tiers
    ]
    assert content == expected
    assert request.num_computed_tokens >= 290


@pytest.mark.parametrize("name", TIERS)
def test_the_same_prompt_again_is_found_whole(name):
    engine = Engine(TIERS[name], 2000)
    read_and_leave(engine)
    engine.add("second", tokens(0, 290))
    engine.step(1000)
    assert engine.hits["second"] == 288


@pytest.mark.parametrize("name", ["one tier", "odd ratios", "capped", *QUANTIZED])
def test_a_prefix_is_found_although_its_hot_pages_were_overwritten(name):
    """The compressed pages alone serve the hit: the pool is too small for the full ones."""
    plans = TIERS[name]
    pages = 1 + sum(peak_pages(plan, 300) for plan in plans) + 8
    engine = Engine(plans, pages)
    read_and_leave(engine)
    full = sum(290 // plan.page for plan in plans)
    assert pages < full, "the pool must be smaller than the full prompt for this to show anything"
    engine.add("second", tokens(0, 290))
    engine.step(1000)
    assert engine.hits["second"] == 288


@pytest.mark.parametrize("name", TIERS)
def test_a_shorter_prefix_is_found_while_its_pages_last(name):
    """Collapses go to fresh pages: the hot pages they leave behind still serve prefix hits."""
    engine = Engine(TIERS[name], 2000)
    read_and_leave(engine)
    engine.add("second", tokens(0, 150) + [9] * 100)
    engine.step(1000)
    assert engine.hits["second"] == 148


def test_a_shared_prefix_is_read_by_both_and_written_by_none():
    engine = Engine(TIERS["one tier"], 400)
    engine.add("a", tokens(0, 200))
    run_to(engine, 200, 64)
    engine.add("b", tokens(0, 200) + [9] * 60)
    engine.step(1000)
    assert engine.hits["b"] == 200
    tables = [engine.tiers[0].req_to_blocks[name] for name in ("a", "b")]
    assert sum(x is y and not x.is_null for x, y in zip(*tables, strict=False)) > 20
    run_to(engine, 260, 64)  # both go on and collapse what they share: checked at each step


def test_an_exhausted_pool_with_shared_pages_preempts_and_recovers():
    plans = TIERS["one tier"]
    engine = Engine(plans, 40)
    for name in "abc":
        engine.add(name, tokens(0, 90))
    for _ in range(120):
        engine.step(1000)
        for request in list(engine.running):
            if request.num_tokens > 130:
                engine.abort(request)
    assert engine.preemptions > 0
    assert not engine.waiting


def test_a_session_that_found_no_page_to_copy_to_goes_on_when_there_are_some():
    engine = Engine(TIERS["one tier"], 100)
    first, second = (_session_at_a_boundary(engine, name) for name in "ab")
    taken = engine.pool.get_new_blocks(engine.pool.get_num_free_blocks())
    engine.waiting.append(second)
    blocks = engine.manager.empty_kv_cache_blocks
    asked = [
        engine.manager.allocate_slots(second, 1, 0, blocks, full_sequence_must_fit=True)
        for _ in range(2)
    ]
    assert asked == [None, None]
    assert engine.tiers[0]._stuck, "it must have been refused for that, or this says nothing"
    engine.pool.free_blocks(taken)
    engine.step(1000)
    assert second in engine.running
    engine.abort(first)


def _session_at_a_boundary(engine: Engine, name: str):
    """A request of 96 tokens that waits with its pages, and nobody lets it in."""
    request = engine.add(name, tokens(0, 96))
    run_to(engine, 96, 1000)
    engine.extend(request, [1])
    engine.waiting.remove(request)
    return request


def test_admission_counts_the_peak_and_not_the_length():
    plan = TierPlan("all", PAGE, PAGE, 16, 32, 16, 0.25, 4)
    pages = 1 + peak_pages(plan, 400)
    engine = Engine([plan], pages)
    engine.add("r", tokens(0, 400))
    run_to(engine, 400, 10_000)
    assert pages < 400 // PAGE
    assert engine.preemptions == 0


def test_prompts_that_are_read_side_by_side_do_not_preempt_each_other():
    """Each is read an interval a step; pages that are free when it comes are soon others'."""
    plan = TierPlan("all", PAGE, PAGE, 16, 32, 16, 0.5, 0)
    engine = Engine([plan], 1 + 3 * (peak_pages(plan, 600) + 1))  # and a page for their answers
    requests = [engine.add(f"r{i}", tokens(i, 600)) for i in range(8)]
    most = 0
    for _ in range(400):
        engine.step(1000)
        most = max(most, len(engine.running))
        for request in list(engine.running):
            if request.num_tokens >= 602:
                engine.abort(request)
    assert not engine.running
    assert not engine.waiting
    assert all(request.num_tokens >= 602 for request in requests)
    assert engine.preemptions == 0
    assert most >= 3, "they must meet, or this says nothing"


@given(tiers(), st.integers(1, 300), st.sampled_from([5, 64, 1000]))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_what_is_not_held_was_counted_as_evicted(plans, length, budget):
    engine = Engine(plans, 3000)
    request = engine.add("r", tokens(0, length))
    run_to(engine, length, budget)
    for plan, tier in zip(plans, engine.tiers, strict=True):
        counts = tier.take_counts()
        done, at = request.num_computed_tokens, tier.progress_of("r")
        assert at >= boundary(plan, done - 1)
        assert counts.tokens_evicted == done - held_tokens(plan, at, done)
        held = held_pages(plan, at, done)
        assert counts.freed == -(-done // plan.page) - held
        assert counts.holes == counts.freed
        assert counts.hot + counts.cold == held


@pytest.mark.parametrize("name", TIERS)
def test_pages_of_requests_that_ask_for_different_things_are_kept_apart(name):
    wishes = [AS_SERVED, Control(off=True), Control(keep=0.5), Control(protect=((40, 60),))]
    for first in wishes:
        for second in wishes:
            engine = Engine(TIERS[name], 2000)
            engine.abort(_read(engine, "first", first))
            engine.add("second", tokens(0, 290), second)
            engine.step(1000)
            assert engine.hits["second"] == (288 if first == second else 0)


@pytest.mark.parametrize("name", TIERS)
def test_what_is_protected_further_on_does_not_matter_yet(name):
    """Turns of a chat: each protects its last message, and finds the pages before that."""
    engine = Engine(TIERS[name], 2000)
    engine.abort(_read(engine, "first", Control(protect=((0, 20), (150, 170)))))
    engine.add("second", tokens(0, 290), Control(protect=((0, 20), (200, 220))))
    engine.step(1000)
    assert engine.hits["second"] == 148


@pytest.mark.parametrize("name", TIERS)
def test_hashes_do_not_depend_on_when_they_were_asked_for(name):
    asked = Control(keep=0.5, protect=((3, 9), (100, 130)))
    engine = Engine(TIERS[name], 2000)
    at_once = engine.add("a", tokens(0, 120), asked)
    grown = engine.add("b", tokens(0, 7), asked)
    for token in tokens(0, 120)[7:]:
        grown.append_output_token_ids(token)
    assert at_once.block_hashes == grown.block_hashes
    assert len(set(at_once.block_hashes)) == 30


def _read(engine: Engine, name: str, asked: Control):
    request = engine.add(name, tokens(0, 290), asked)
    run_to(engine, 290, 64)
    return request


def test_quantizing_frees_pages_and_evicts_nothing():
    engine = Engine(TIERS["quantized"], 2000)
    read_and_leave(engine)
    counts = engine.tiers[0].take_counts()
    assert counts.tokens_evicted == 0
    assert counts.freed == counts.collapses * (28 // PAGE - 28 // 14) > 0
