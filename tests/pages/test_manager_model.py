# SPDX-License-Identifier: Apache-2.0
"""The page manager under random load, held to a model of the workers' memory at each step."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from entropykv_vllm.plan.schedule import TierPlan, peak_pages

from .model import Engine

PAGE = 4

TIERS = {
    "one tier": [TierPlan("all", PAGE, 16, 32, 16, 0.5, 4)],
    "odd ratios": [
        TierPlan("early", PAGE, 16, 32, 24, 0.75, 4),
        TierPlan("middle", PAGE, 16, 32, 8, 0.3, 4),
    ],
    "capped": [
        TierPlan("capped", PAGE, 16, 32, 16, 0.5, 4, cap=32),
        TierPlan("full but capped", PAGE, 16, 32, 16, 1.0, 4, cap=48),
    ],
    "whole and window": [
        TierPlan("whole", PAGE, 16, 32, 16, 1.0, 4),
        TierPlan("sinks", PAGE, 16, 32, 12, 0.0, 4),
        TierPlan("window", PAGE, 16, 32, 40, 0.0, 0),
    ],
    "long segments": [TierPlan("all", PAGE, 64, 32, 8, 0.25, 2)],
}

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 3), st.integers(1, 300)),
        st.tuples(st.just("abort"), st.integers(0, 5), st.just(0)),
        st.tuples(st.just("step"), st.integers(1, 200), st.integers(1, 6)),
        st.tuples(st.just("reset"), st.just(0), st.just(0)),
    ),
    min_size=5,
    max_size=60,
)


def tokens(family: int, length: int) -> list[int]:
    """Prompts of a family share their prefix, to any length."""
    return [(position * 31 + family * 1000 * (position > 40)) % 50_000 for position in range(length)]


def longest(engine: Engine) -> int:
    """Prompts must fit the pool alone, or vLLM refuses them at the door."""
    total = engine.pool.num_gpu_blocks - 1
    fits = [n for n in range(1, 400) if sum(peak_pages(p, n + 60) for p in engine.plans) < total]
    return max(fits, default=0)


@pytest.mark.parametrize("name", TIERS)
@pytest.mark.parametrize("caching", [True, False])
@given(steps=STEPS, pages=st.integers(30, 400))
@settings(
    max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
def test_every_page_holds_what_the_plan_says(name, caching, steps, pages):
    engine = Engine(TIERS[name], pages, caching)
    limit = longest(engine)
    if limit == 0:
        return
    for number, (what, first, second) in enumerate(steps):
        if what == "add":
            engine.add(f"r{number}", tokens(first, min(second, limit)))
        elif what == "abort" and (active := engine.running + engine.waiting):
            engine.abort(active[first % len(active)])
            engine.check()
        elif what == "reset":
            engine.manager.reset_prefix_cache()
        elif what == "step":
            for _ in range(second):
                engine.step(budget=first)
                for request in list(engine.running):
                    if request.num_tokens >= limit + 50:
                        engine.abort(request)
    for request in engine.running + engine.waiting:
        engine.abort(request)
    assert engine.pool.get_num_free_blocks() == engine.pool.num_gpu_blocks - 1, "pages leaked"


def run_to(engine: Engine, length: int, budget: int) -> None:
    while any(r.num_computed_tokens < length for r in engine.running) or engine.waiting:
        engine.step(budget)


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
    first = engine.add("first", tokens(0, 290))
    run_to(engine, 290, 64)
    engine.abort(first)
    engine.add("second", tokens(0, 290))
    engine.step(1000)
    assert engine.hits["second"] == 288


@pytest.mark.parametrize("name", ["one tier", "odd ratios", "capped"])
def test_a_prefix_is_found_although_its_hot_pages_were_overwritten(name):
    """The compressed pages alone serve the hit: the pool is too small for the full ones."""
    plans = TIERS[name]
    pages = 1 + sum(peak_pages(plan, 300) for plan in plans) + 8
    engine = Engine(plans, pages)
    first = engine.add("first", tokens(0, 290))
    run_to(engine, 290, 64)
    full = sum(290 // plan.page for plan in plans)
    assert pages < full, "the pool must be smaller than the full prompt for this to show anything"
    engine.abort(first)
    engine.add("second", tokens(0, 290))
    engine.step(1000)
    assert engine.hits["second"] == 288


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


def test_admission_counts_the_peak_and_not_the_length():
    plan = TierPlan("all", PAGE, 16, 32, 16, 0.25, 4)
    pages = 1 + peak_pages(plan, 400)
    engine = Engine([plan], pages)
    engine.add("r", tokens(0, 400))
    run_to(engine, 400, 10_000)
    assert pages < 400 // PAGE
    assert engine.preemptions == 0
