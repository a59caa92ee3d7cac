# SPDX-License-Identifier: Apache-2.0
"""Replicas by the pages that requests ask for, and settings on their way through Ray Serve."""

from types import SimpleNamespace

import pytest

from entropykv_vllm.serving import metrics
from entropykv_vllm.serving.ray_scaling import DEMAND, PagesAskedFor


def context(replicas: int, told: list[float] | None):
    found = None if told is None else {DEMAND: dict(enumerate(told))}
    return SimpleNamespace(current_num_replicas=replicas, aggregated_metrics=found)


@pytest.mark.parametrize(
    ("replicas", "told", "wanted"),
    [
        (2, [0.7, 0.7], 2),
        (2, [1.4, 1.4], 4),
        (2, [0.35, 0.35], 1),
        (4, [0.0, 0.0, 0.0, 0.0], 0),  # Ray keeps the least number that it was given
        (2, [1.4], 4),  # the other has told nothing yet
        (3, [], 3),
        (3, None, 3),
    ],
)
def test_replicas_follow_the_pages(replicas, told, wanted):
    assert PagesAskedFor(target=0.7)(context(replicas, told))[0] == pytest.approx(wanted)


@pytest.mark.parametrize("target", [0, -1, 1.5])
def test_a_target_is_a_share(target):
    with pytest.raises(ValueError, match="target is a share"):
        PagesAskedFor(target)


@pytest.mark.parametrize(
    ("running", "waiting", "usage", "demand"),
    [(0, 0, 0.0, 0), (0, 3, 0.0, 1), (2, 0, 0.5, 0.5), (2, 2, 0.5, 1.0), (4, 12, 1.0, 4.0)],
)
def test_waiting_requests_ask_for_as_much_as_running_ones(running, waiting, usage, demand):
    stats = SimpleNamespace(
        num_running_reqs=running, num_waiting_reqs=waiting, kv_cache_usage=usage
    )
    assert metrics._demand(stats) == demand


def test_a_replica_of_several_engines_asks_for_what_one_does_on_average(monkeypatch):
    monkeypatch.setattr(metrics, "_DEMAND", {0: 0.6, 1: 0.8})
    assert metrics.demand() == pytest.approx(0.7)
    monkeypatch.setattr(metrics, "_DEMAND", {})
    assert metrics.demand() == 0


def test_settings_become_what_vllm_takes():
    pytest.importorskip("ray")
    from entropykv_vllm import engine_args
    from entropykv_vllm.serving.ray_serve import EvictionServer, with_eviction

    engine = {"kv_eviction": "entropykv", "kv_eviction_config": "extreme", "max_model_len": 99}
    model = with_eviction({"model_loading_config": {"model_id": "m"}, "engine_kwargs": engine})
    assert model["server_cls"] is EvictionServer
    assert model["engine_kwargs"] == {**engine_args("entropykv", "extreme"), "max_model_len": 99}
    own = {"engine_kwargs": {**engine, "block_size": 64, "additional_config": {"theirs": 1}}}
    mixed = with_eviction(own)["engine_kwargs"]
    assert mixed["block_size"] == 64
    assert mixed["additional_config"]["theirs"] == 1
    assert len(mixed["additional_config"]) == 2
    off = {"engine_kwargs": {"kv_eviction": "none", "max_model_len": 99}}
    assert with_eviction(off) == {"engine_kwargs": {"max_model_len": 99}}


@pytest.mark.parametrize(
    ("engine", "says"),
    [
        ({"kv_eviction_config": "max"}, "needs kv_eviction beside it"),
        ({"kv_eviction": "entropykv", "kv_eviction_config": "nonsense"}, "nonsense"),
        ({"kv_eviction": "entropykv", "worker_cls": "theirs.Worker"}, "sets worker_cls itself"),
        ({"kv_eviction": "entropykv", "scheduler_cls": "theirs.Plan"}, "sets scheduler_cls itself"),
    ],
)
def test_wrong_settings_are_refused_in_words(engine, says):
    pytest.importorskip("ray")
    from entropykv_vllm.serving.ray_serve import with_eviction

    with pytest.raises(ValueError, match=says):
        with_eviction({"engine_kwargs": engine})


def test_what_a_file_leaves_empty_is_left_out():
    pytest.importorskip("ray")
    from entropykv_vllm import engine_args
    from entropykv_vllm.serving.ray_serve import with_eviction

    assert with_eviction({"engine_kwargs": None}) == {"engine_kwargs": {}}
    empty = {"kv_eviction": "entropykv", "kv_eviction_config": None, "additional_config": None}
    assert with_eviction({"engine_kwargs": empty})["engine_kwargs"] == engine_args("entropykv")
