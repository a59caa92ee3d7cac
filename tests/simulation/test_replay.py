# SPDX-License-Identifier: Apache-2.0
"""Replicas in time: when steps start and end, who gets what, and what is added up."""

import pytest

from entropykv_vllm.plan.pool import Pool, Whole
from entropykv_vllm.simulation.cost import CARDS, Cost, Steps, card_of, estimate
from entropykv_vllm.simulation.fleet import Fleet
from entropykv_vllm.simulation.job import Job
from entropykv_vllm.simulation.outcome import limit, outcome
from entropykv_vllm.simulation.replay import Replay, replay
from entropykv_vllm.simulation.router import ROUTERS
from entropykv_vllm.simulation.trace import Request

PAGE = 16


def fleet(**changed) -> Fleet:
    usual = {
        "plan": Pool(1, (Whole(PAGE),)),
        "pages": 1000,
        "longest": 4096,
        "replicas": 1,
        "step_tokens": 100,
        "requests": 4,
        "caching": True,
        "ahead": False,
    }
    return Fleet(**{**usual, **changed})


def run(here: Fleet, requests, router="round-robin", full=False, price=None) -> Replay:
    ended: list[int] = []
    found = replay(requests, here.lanes(price or Steps()), ROUTERS[router](), full, ended.append)
    assert sum(ended) == len(requests) == len(found.jobs)
    assert all(lane.replica.memory.held == 0 for lane in found.lanes), "pages leaked"
    return found


@pytest.mark.parametrize("ahead", [False, True])
def test_a_request_alone_takes_a_step_for_each_chunk_and_each_token_after(ahead):
    found = run(fleet(ahead=ahead), [Request(5.0, 250, 10)])
    (job,) = found.jobs
    assert (job.started, job.answered, job.finished) == (5.0, 8.0, 17.0)
    notes = found.lanes[0].notes
    assert (notes.steps, notes.tokens, notes.answered) == (12, 259, 10)


def test_a_request_that_comes_in_a_step_waits_for_its_end():
    first, second = run(fleet(), [Request(0.0, 50, 20), Request(3.5, 50, 2)]).jobs
    assert (second.started, second.answered, second.finished) == (4.0, 5.0, 6.0)
    assert first.finished == 20.0


def test_a_request_that_comes_in_a_step_waits_for_two_if_one_is_planned_ahead():
    requests = [Request(0.0, 50, 20), Request(3.5, 50, 2)]
    _, second = run(fleet(ahead=True), requests).jobs
    assert (second.started, second.answered) == (4.0, 6.0)


def test_what_a_replica_holds_and_how_many_wait_is_weighed_by_time():
    """One request at a time: 4 pages, then 5 from the 65th token on."""
    requests = [Request(0.0, 60, 10), Request(0.0, 60, 10)]
    found = outcome(run(fleet(requests=1, caching=False), requests), 1000)
    assert found["steps"] == found["seconds"] == found["busy_seconds"] == 20
    assert found["held_pages"] == pytest.approx((5 * 4 + 5 * 5) / 10)
    assert (found["peak_pages"], found["peak_share"]) == (5, 0.005)
    assert found["queue"] == pytest.approx(0.5)
    assert (found["queue_most"], found["running"], found["running_most"]) == (1, 1, 1)
    assert found["wait"] == {"mean": 5, "median": 10, "p95": 10, "most": 10}
    assert found["answer_rate"] == 1


def test_prefix_hits_count_when_a_request_is_first_admitted():
    shared = ((96, 1),)
    requests = [Request(0.0, 100, 5, shared), Request(50.0, 100, 5, shared)]
    found = outcome(run(fleet(), requests), 1000)
    assert found["prefix_hit_tokens"] == 96
    assert found["prefix_hit_rate"] == 0.48
    without = outcome(run(fleet(caching=False), requests), 1000)
    assert without["prefix_hit_tokens"] == 0


def test_preemptions_are_counted_and_what_was_lost_is_computed_again():
    requests = [Request(0.0, 60, 60) for _ in range(4)]
    found = outcome(run(fleet(pages=20, caching=False), requests), 20)
    assert found["preemptions"] > 0
    assert 0 < found["preempted_requests"] <= found["preemptions"]
    assert found["computed_tokens"] > 4 * (60 + 60 - 1)
    assert found["answer_tokens"] == 240
    assert found["peak_share"] == 1


def test_the_limit_is_what_is_answered_while_requests_wait():
    """Four at a time, a token each a step, but for the step that reads their prompts."""
    requests = [Request(100.0 * i, 10, 50) for i in range(80)]
    rate, filled = limit(run(fleet(), requests, full=True))
    assert filled
    assert rate == pytest.approx(4, rel=0.05)
    rate, filled = limit(run(fleet(), requests[:3], full=True))
    assert not filled
    assert rate == pytest.approx(3, rel=0.05)


def test_longer_requests_than_a_server_takes_are_refused():
    requests = [Request(0.0, 4000, 96), Request(0.0, 4000, 97)]
    assert fleet().accepted(requests) == requests[:1]


def loads(router: str, requests, replicas: int = 2) -> list[int]:
    found = run(fleet(replicas=replicas), requests, router)
    return [lane.notes.answered for lane in found.lanes]


def test_round_robin_takes_turns_whatever_the_load():
    requests = [Request(0.0, 10, 50 if i % 2 else 1) for i in range(8)]
    assert loads("round-robin", requests) == [4, 200]


def test_the_least_loaded_replica_gets_a_request():
    requests = [Request(0.0, 10, 100), *(Request(float(i), 10, 1) for i in range(2, 10, 2))]
    assert loads("least-loaded", requests) == [100, 4]


def test_requests_with_a_prefix_go_where_it_is():
    requests = [
        Request(20.0 * i, 200, 5, ((160, family),)) for i, family in enumerate([1, 2, 1, 2, 2, 1])
    ]
    found = run(fleet(replicas=2), requests, "prefix")
    assert sum(job.found for job in found.jobs) == 4 * 160
    spread = run(fleet(replicas=2), requests, "round-robin")
    assert sum(job.found for job in spread.jobs) < 4 * 160


def test_one_prefix_does_not_keep_other_replicas_idle():
    first = Request(0.0, 200, 60, ((160, 1),))
    requests = [first, *(Request(10.0, 200, 60, ((160, 1),)) for _ in range(20))]
    assert min(loads("prefix", requests)) > 0


def step_of(*counts: tuple[int, int]):
    from entropykv_vllm.simulation.replica import Step

    jobs = [(Job(0, 1, 2, ()), count) for count, _ in counts]
    for (job, _), (_, held) in zip(jobs, counts, strict=True):
        job.held = held
    return Step(jobs)


def test_a_step_costs_its_products_or_its_weights_and_the_pages_it_reads():
    cost = Cost(fixed=0.02, rate=1000, bandwidth=1e6, page_bytes=100)
    assert cost.seconds(step_of((1, 30), (1, 20))) == pytest.approx(0.02 + 50 * 100 / 1e6)
    assert cost.seconds(step_of((500, 0), (1, 20))) == pytest.approx(0.501 + 20 * 100 / 1e6)


def test_the_card_of_a_size_is_the_largest_that_is_not_larger():
    assert [card_of(size * 10**9).memory // 10**9 for size in (6, 8, 11, 23, 48, 80, 141)] == [
        8,
        8,
        12,
        24,
        24,
        80,
        80,
    ]


def test_larger_cards_are_faster():
    estimates = [estimate(card, 7 * 10**9, 14 * 10**9) for card in CARDS]
    fixed, rates, bandwidths = zip(*estimates, strict=True)
    assert list(fixed) == sorted(fixed, reverse=True)
    assert list(rates) == sorted(rates)
    assert list(bandwidths) == sorted(bandwidths)
