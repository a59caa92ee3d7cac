# SPDX-License-Identifier: Apache-2.0
"""What a worker tells of its requests, and what comes of the answers of several."""

import numpy as np

from entropykv_vllm.page import merge
from entropykv_vllm.plan.request import Control
from entropykv_vllm.plan.schedule import held_pages, held_tokens

from .steps import PLAN, ran, step, view


def only(answer: dict) -> dict:
    (request,) = answer["requests"]
    return request


def test_a_request_is_followed_from_its_prefix_hit_to_its_end():
    worker = view()
    worker.note(step(new={"r": (300, 32, 96)}))
    assert {"prompt": 300, "hit": 32, "start": 32, "end": 128}.items() <= only(
        worker.look({})
    ).items()
    worker.note(step(more={"r": (128, 128)}))
    assert only(worker.look({}))["end"] == 256
    worker.note(step(finished=("r",)))
    assert worker.look({}) == {"total": 0, "requests": [], "held": {}}


def test_pages_are_those_of_the_plan():
    worker = view()
    ran(worker, tokens=1000)
    request = only(worker.look({}))
    hot, cold, holes = request["tiers"]["all"]
    at = request["start"] // PLAN.interval * PLAN.interval
    assert hot + cold == held_pages(PLAN, at, 1000)
    assert hot + cold + holes == -(-1000 // PLAN.page)
    assert cold > 0 < holes


def test_a_request_that_asks_for_no_eviction_holds_all_its_pages():
    worker = view(asked=Control(off=True))
    ran(worker, tokens=1000)
    assert only(worker.look({}))["tiers"]["all"] == [63, 0, 0]
    (group,) = worker.look({"r": [0, -1]})["held"]["r"]["groups"]
    assert (group["hot"], group["tokens"], group["bands"]) == (0, 1000, [])


def test_tokens_that_a_request_protects_are_held_by_all():
    worker = view(asked=Control(protect=((64, 128),)))
    ran(worker, tokens=1000)
    (group,) = worker.look({"r": [0, -1]})["held"]["r"]["groups"]
    shares = {first: share for first, end, share in group["bands"] if first <= 64 < end}
    assert list(shares.values()) == [1.0]
    assert min(share for *_, share in group["bands"]) < 1


def test_a_preempted_request_holds_nothing_until_it_is_read_again():
    worker = view()
    ran(worker, tokens=1000)
    worker.note(step(preempted=("r",)))
    assert only(worker.look({}))["tiers"]["all"] == [0, 0, 0]
    worker.note(step(more={"r": (0, 128)}))
    assert only(worker.look({}))["tiers"]["all"] == [8, 0, 0]


def test_a_name_that_comes_again_is_another_request():
    worker = view()
    worker.note(step(new={"r": (40, 0, 40)}))
    first = only(worker.look({}))["serial"]
    worker.note(step(new={"r": (50, 0, 50)}, finished=("r",)))
    again = only(worker.look({}))
    assert (again["serial"] != first, again["prompt"]) == (True, 50)


def test_what_is_known_is_not_told_again_until_the_next_boundary():
    worker = view()
    ran(worker, tokens=1000)
    held = worker.look({"r": [0, -1]})["held"]["r"]
    assert held["groups"][0]["tokens"] == held_tokens(PLAN, held["at"], 1000)
    assert held["groups"][0]["bands"]
    known = {"r": [held["serial"], held["at"]]}
    assert "bands" not in worker.look(known)["held"]["r"]["groups"][0]
    worker.note(step(more={"r": (1024, 1)}))
    assert "bands" in worker.look(known)["held"]["r"]["groups"][0]


def test_only_requests_that_are_there_are_told_of():
    worker = view()
    ran(worker, tokens=100)
    assert worker.look({"other": [0, -1], "": [0, -1]})["held"] == {}
    assert merge.told([worker.look({"other": [0, -1]})], "other") is None


def test_many_requests_are_counted_and_not_all_named():
    worker = view()
    worker.note(step(new={f"r{i}": (10, 0, 10) for i in range(300)}))
    answer = worker.look({})
    assert (answer["total"], len(answer["requests"])) == (300, 256)


def test_long_names_are_cut():
    """Clients choose them, and every browser is told all of them each second."""
    worker = view()
    worker.note(step(new={"r" * 60_000: (10, 0, 10)}))
    assert only(worker.look({}))["id"] == "r" * 512


def test_layers_of_all_stages_and_heads_of_all_ranks_are_put_together():
    first, second = view(layers=(0, 1)), view(layers=(4, 2))
    (tier,) = merge.tiers([first.tiers(), second.tiers()])
    assert tier["layers"] == [0, 1, 2, 4]
    assert {"window": 64, "keep": 0.5, "bits": 16}.items() <= tier.items()


def counted(counts: list[int] | None, hot: int, pairs: int, at: int = 128) -> dict:
    """An answer of a worker that keeps positions."""
    held = None if counts is None else np.array(counts, np.uint16).tobytes()
    group = {"tier": "all", "hot": hot, "tokens": 9, "pairs": pairs, "bands": [], "counts": held}
    return {"held": {"r": {"serial": 1, "at": at, "end": 9, "groups": [group]}}}


def test_shares_are_of_the_layers_and_heads_of_all_workers():
    told = merge.told([counted([4, 0, 2], 3, 4), counted([2, 2, 0], 3, 2)], "r")
    assert list(told.tiers["all"].shares) == [255, 85, 85]
    stage_without_layers = counted([0, 0, 0], 3, 0)
    told = merge.told([counted([4, 0, 2], 3, 4), stage_without_layers], "r")
    assert list(told.tiers["all"].shares) == [255, 0, 128]


def test_without_positions_there_are_no_shares():
    assert merge.told([counted(None, 3, 4)], "r").tiers["all"].shares is None


def test_a_stage_that_is_a_step_ahead_does_not_count():
    told = merge.told([counted([4, 0, 2, 9, 9], 5, 4, at=256), counted([2, 2, 0], 3, 2)], "r")
    assert (told.at, told.tiers["all"].hot, len(told.tiers["all"].shares)) == (128, 3, 3)
