# SPDX-License-Identifier: Apache-2.0
"""The debug mode of workers finds pages that changed unasked, and only those."""

from types import SimpleNamespace

import pytest
import torch

from entropykv_vllm.pages.moves import PageMove
from entropykv_vllm.serving.checksums import Checksums

PAGE = 4


def step(new=(), more=(), names=("a",), cleared=None):
    return SimpleNamespace(
        num_scheduled_tokens=dict.fromkeys(names, 1),
        new_block_ids_to_zero=cleared,
        scheduled_new_reqs=[SimpleNamespace(block_ids=rows) for rows in new],
        scheduled_cached_reqs=SimpleNamespace(new_block_ids=list(more)),
    )


@pytest.fixture
def world():
    """A request at its token 13, in the pages 3, 5, and 7, of which the last is not full."""
    caches = [torch.randn(12, 2, PAGE, 32).bfloat16() for _ in range(2)]
    request = SimpleNamespace(block_ids=[[3, 0, 5, 7]], num_computed_tokens=13)
    runner = SimpleNamespace(requests={"a": request})
    sums = Checksums(runner, {0: caches})
    sums.check(step(new=[[[3, 5, 7]]]), [])
    assert set(sums.sums[0]) == {3, 5}
    return sums, caches, request


def test_a_step_that_adds_a_token_changes_nothing_else(world):
    sums, caches, _ = world
    caches[1][7, 0, 2, 5] += 1
    sums.check(step(), [])


@pytest.mark.parametrize("place", [(0, 3, 0, 0, 0), (1, 5, 1, 3, 31)])
def test_a_page_that_changed_unasked_is_told(world, place):
    sums, caches, _ = world
    caches[place[0]][place[1:]] += 1
    with pytest.raises(RuntimeError, match=f"did not write them: {place[1]}$"):
        sums.check(step(), [])


def test_tokens_and_layers_that_change_places_are_told(world):
    sums, caches, _ = world
    for place in (caches[0][3, 0], torch.stack([c[5] for c in caches])):
        assert not torch.equal(place, place.flip(0)), "it must change to say anything"
    caches[0][3] = caches[0][3].flip(1)
    caches[0][5], caches[1][5] = caches[1][5].clone(), caches[0][5].clone()
    with pytest.raises(RuntimeError, match=r"did not write them: 3, 5$"):
        sums.check(step(), [])


def test_a_page_that_was_moved_to_may_change(world):
    sums, caches, request = world
    caches[0][3] += 1
    request.block_ids = [[3, 0, 0, 7]]
    sums.check(step(), [PageMove(1, 0, "a", (0, 2), (3, 5), (3,), 0)])
    sums.check(step(), [])


@pytest.mark.parametrize("new", [True, False])
def test_a_page_that_was_handed_out_may_change(world, new):
    sums, caches, request = world
    request.block_ids, request.num_computed_tokens = [[3]], 4
    caches[0][5] += 1
    sums.check(step(new=[[[5]]]) if new else step(more=[None, [[5]]]), [])


def test_a_page_that_was_freed_serves_hits_so_it_stays_as_it_is(world):
    sums, caches, _ = world
    sums.runner.requests.clear()
    caches[0][5] += 1
    with pytest.raises(RuntimeError, match="did not write them: 5"):
        sums.check(step(names=[]), [])


def test_pages_of_a_preempted_request_are_others(world):
    """The runner remembers them until it goes on, and who has them now fills them bit by bit."""
    sums, caches, _ = world
    sums.runner.requests["b"] = SimpleNamespace(block_ids=[[5]], num_computed_tokens=0)
    caches[0][5, :, 0] = 1
    sums.check(step(new=[[[5]]], names=["b"]), [])
    caches[0][5, :, 1] = 1
    sums.check(step(names=["b"]), [])


def test_a_page_that_was_cleared_for_a_request_that_did_not_get_it(world):
    sums, caches, _ = world
    caches[0][5] = 0
    sums.check(step(cleared=[5]), [])


def test_after_a_sleep_nothing_is_known_of_any_page(world):
    sums, caches, _ = world
    sums.forget()
    caches[0][3] += 1
    sums.check(step(), [])
    caches[0][3] += 1
    with pytest.raises(RuntimeError, match="did not write them: 3"):
        sums.check(step(), [])
