# SPDX-License-Identifier: Apache-2.0
"""Requests whose prompt comes in parts (vLLM's streaming input): they wait with their pages."""

import pytest

from entropykv_vllm.pages.control import control_of
from entropykv_vllm.plan.pool import Evicted, Pool
from entropykv_vllm.plan.schedule import TierPlan, held_pages, peak_pages

from ..simulation.scheduled import Server, make_scheduler

PAGE = 4
PLAN = TierPlan("all", PAGE, PAGE, 16, 32, 16, 0.5, 4)


def part(name: str, tokens: int, answer: int = 1):
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher
    from vllm.v1.request import Request

    return Request(
        name,
        [(ord(name) + place * place) % 97 for place in range(tokens)],
        SamplingParams(max_tokens=answer, ignore_eos=True),
        None,
        block_hasher=get_request_block_hasher(PAGE, sha256),
        resumable=True,
    )


def run(scheduler, steps: int = 60) -> None:
    """A model answers until nothing is left to do."""
    from vllm.v1.outputs import ModelRunnerOutput

    for _ in range(steps):
        output = scheduler.schedule()
        names = list(output.num_scheduled_tokens)
        read = [
            scheduler.requests[name].num_computed_tokens == scheduler.requests[name].num_tokens
            for name in names
        ]
        places = {name: i for i, name in enumerate(names)}
        tokens = [[1] if done else [] for done in read]
        scheduler.update_from_output(output, ModelRunnerOutput(names, places, tokens))


def read(scheduler) -> dict[str, int]:
    return {name: request.num_computed_tokens for name, request in scheduler.requests.items()}


@pytest.mark.parametrize("caching", [True, False])
def test_a_session_that_goes_on_needs_only_what_it_lacks(caching):
    pages = peak_pages(PLAN, 400) + 2
    scheduler = make_scheduler(Server(Pool(1, (Evicted(PLAN),)), pages, 1000, 8, 32, caching))
    for _ in range(4):
        scheduler.add_request(part("a", 100))
        run(scheduler)
    assert read(scheduler) == {"a": 400}


def test_sessions_that_wait_keep_nothing_free_for_each_other():
    """Both lack more than is there for both; the one that asked first has the other before it."""
    from vllm.v1.request import RequestStatus

    held, most = held_pages(PLAN, 128, 150), peak_pages(PLAN, 450)
    scheduler = make_scheduler(Server(Pool(1, (Evicted(PLAN),)), held + most + 2, 1000, 8, 32))
    for name in "ba":
        scheduler.add_request(part(name, 150))
    run(scheduler)
    scheduler.add_request(part("c", 8, answer=1000))
    run(scheduler, 6)
    scheduler.add_request(part("a", 300))
    run(scheduler, 6)
    assert read(scheduler)["a"] == 150, "it must have asked in vain, or this says nothing"
    scheduler.finish_requests("c", RequestStatus.FINISHED_ABORTED)
    scheduler.add_request(part("b", 300))
    run(scheduler)
    assert read(scheduler) == {"a": 150, "b": 450}


@pytest.mark.parametrize("caching", [True, False])
def test_a_session_that_outgrows_what_it_asked_for_is_served_as_others(caching):
    """It would wait for pages that never come, and all others behind it."""
    pages = peak_pages(PLAN, 400) + peak_pages(PLAN, 50)
    scheduler = make_scheduler(Server(Pool(1, (Evicted(PLAN),)), pages, 1000, 8, 32, caching))
    first = part("a", 100)
    first.sampling_params.extra_args = {"kv_eviction": "none"}
    scheduler.add_request(first)
    run(scheduler)
    assert control_of(first).off, "it must get what it asked for at first, or this says nothing"
    for _ in range(3):
        scheduler.add_request(part("a", 100))
        run(scheduler)
    scheduler.add_request(part("b", 50))
    run(scheduler)
    assert read(scheduler) == {"a": 400, "b": 50}
    assert not control_of(first).off
