# SPDX-License-Identifier: Apache-2.0
"""The simulation against vLLM's own scheduler over our page managers, step by step."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entropykv_vllm.plan.pool import Evicted, Pool, Sliding, Whole

from ..pages.tiers import PAGE, TIERS, tiers
from .scheduled import Asked, Seen, Server, replayed, scheduled

WINDOW = Sliding(PAGE, 4 * PAGE + 1, 0)
ODD = Sliding(PAGE, 7 * PAGE + 3, 0)

#: Tables of vLLM alone, and of ours beside vLLM's sliding windows.
TABLES = {
    "full": (Whole(PAGE),),
    "full twice": (Whole(PAGE), Whole(PAGE)),
    "sliding": (WINDOW,),
    "full and sliding": (WINDOW, Whole(PAGE), WINDOW),
    "full and two windows": (Whole(PAGE), WINDOW, ODD),
    "tiers and sliding": (WINDOW, *map(Evicted, TIERS["odd ratios"]), ODD),
    "twins": (Evicted(TIERS["quantized"][0]),) * 2 + (Evicted(TIERS["capped"][0]),),
}


def prompt(rng: random.Random, number: int) -> tuple[int, ...]:
    """Of three families that share their first 40 tokens, each alike up to somewhere."""
    family, own = rng.randrange(3), rng.choice([0, 40, 90, 1000])
    return tuple(
        (place * 31 + 1000 * family * (place > 40) + 5000 * (number + 1) * (place > own)) % 50_000
        for place in range(rng.randint(1, 200))
    )


def trace(rng: random.Random, count: int) -> list[Asked]:
    """Requests that come by ones and by groups; half of the answers may be alike."""
    found, step = [], 0
    for number in range(count):
        tokens = range(rng.randint(1, 60))
        alike = rng.random() < 0.5
        answer = tuple(token * 7 % 91 if alike else rng.randrange(91) for token in tokens)
        found.append(Asked(step, prompt(rng, number), answer))
        step += rng.choice([0, 0, 1, 3, 20])
    return found


def server(
    tables: tuple, asked: list[Asked], numbers: tuple[int, int, int], caching: bool, ahead: bool
) -> Server:
    """A server whose pool holds the longest of some requests, and a little more.

    Args:
        numbers: pages more than that, the tokens of a step and the requests of a step.
    """
    slack, step_tokens, requests = numbers
    in_flight = (1 + ahead) * step_tokens
    tables = tuple(
        replace(table, in_flight=in_flight) if isinstance(table, Sliding) else table
        for table in tables
    )
    plan = Pool(1, tables)
    pages = slack + plan.peak(max(len(one.prompt + one.answer) for one in asked))
    intervals = [table.plan.interval for table in tables if isinstance(table, Evicted)]
    interval = intervals[0] if intervals else None
    return Server(plan, pages, step_tokens, requests, interval, caching, ahead)


def same(here: Server, asked: list[Asked]) -> list[Seen]:
    """Compare each step; what vLLM did."""
    simulated, true = replayed(here, asked), scheduled(here, asked)
    for place, (ours, theirs) in enumerate(zip(simulated, true, strict=False)):
        assert ours == theirs, f"step {place} differs"
    assert len(simulated) == len(true)
    return true


SEEDS = st.integers(0, 1 << 30)
NUMBERS = st.tuples(
    st.sampled_from([0, 3, 10, 40, 300]),
    st.sampled_from([3, 7, 40, 100, 1000]),
    st.sampled_from([1, 3, 8]),
)


@pytest.mark.parametrize("name", TABLES)
@given(SEEDS, NUMBERS, st.booleans(), st.booleans())
@settings(max_examples=20, deadline=None, derandomize=True)
def test_each_step_is_vllms(name, seed, numbers, caching, ahead):
    asked = trace(random.Random(seed), 12)
    same(server(TABLES[name], asked, numbers, caching, ahead), asked)


@given(tiers(), SEEDS, NUMBERS, st.booleans(), st.booleans())
@settings(max_examples=120, deadline=None, derandomize=True)
def test_each_step_with_any_tiers_is_vllms(plans, seed, numbers, caching, ahead):
    asked = trace(random.Random(seed), 12)
    same(server(tuple(map(Evicted, plans)), asked, numbers, caching, ahead), asked)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("name", TIERS)
def test_each_step_of_a_long_run_is_vllms(name, ahead):
    """So long that there is much to compare: requests lose their pages, and find others'."""
    asked = trace(random.Random(1), 60)
    seen = same(server(tuple(map(Evicted, TIERS[name])), asked, (10, 100, 8), True, ahead), asked)
    assert sum(len(step.preempted) for step in seen) > 3
    assert sum(hit for step in seen for _, hit in step.admitted) > 500
    assert sum(len(step.finished) for step in seen) == 60
