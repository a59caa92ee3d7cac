# SPDX-License-Identifier: Apache-2.0
"""Which layers keep more, which settings are tried, and which of them wins."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from entropykv_vllm.config.profile import fingerprint
from entropykv_vllm.config.settings import load
from entropykv_vllm.evaluation import calibrate
from entropykv_vllm.evaluation.calibration import (
    allocation,
    interval,
    profile,
    scan,
    search,
    signals,
)
from entropykv_vllm.evaluation.calibration.run import Summary
from entropykv_vllm.evaluation.offline.cell import Cell
from entropykv_vllm.evaluation.tune import race
from entropykv_vllm.model.fetch import NAME
from entropykv_vllm.plan.capacity import capacity
from entropykv_vllm.plan.schedule import TierPlan, peak_pages
from entropykv_vllm.plan.tiers import make_tiers

ORDER = [3, 0, 5, 1, 2, 4]


def summary(name, right, held=0.2, nll=0.0, keep=0.25):
    return Summary(Cell(name, "entropykv", {"keep": keep}), held, nll, right, 0.0)


@given(st.integers(1, 60), st.integers(0, 30), st.floats(0.05, 1), st.floats(0.1, 1))
def test_tiers_keep_the_mean_or_are_refused(layers, whole, keep, top):
    order = list(range(layers))
    made = allocation.tiers(order, min(whole, layers - 1), keep, top)
    if made is None:
        return
    total = sum(len(tier["layers"]) * tier["keep"] for tier in made)
    assert total == pytest.approx(keep * layers, abs=1e-4 * layers)
    assert sorted(layer for tier in made for layer in tier["layers"]) == order


def test_the_most_sensitive_layers_keep_most():
    sensitive, rest = allocation.tiers(ORDER, 2, 0.5)
    assert sensitive == {"name": "sensitive", "layers": [0, 3], "keep": 1.0}
    assert rest == {"name": "rest", "layers": [1, 2, 4, 5], "keep": 0.25}
    assert allocation.tiers(ORDER, 3, 0.5) is None  # nothing would be left for the others


def test_sizes_need_no_padding():
    assert allocation.sizes(30) == [1, 2, 3, 5, 6, 10, 15]
    assert all(30 % size == 0 for size in allocation.sizes(30))


def test_layers_are_ranked_by_what_cutting_them_costs():
    assert allocation.ranked({0: 0.1, 1: 0.5, 2: 0.1}) == [1, 0, 2]


def test_a_scan_cuts_one_layer_at_a_time():
    whole, *cut = scan.cells([0, 1, 2])
    assert whole.policy == "none"
    assert [cell.eviction["tiers"][0]["layers"] for cell in cut] == [[0], [1], [2]]
    assert cut[1].eviction["tiers"][1] == {"name": "whole", "layers": [0, 2], "keep": 1.0}
    assert scan.cells([4])[1].config(None).tiers[0].layers == (4,)


def test_the_best_tiers_answer_most_and_of_equals_the_least_surprised_wins():
    full = summary("full", 1.0)
    tried = [full, summary("a", 0.5), summary("b", 0.75, nll=0.3), summary("c", 0.75, nll=0.2)]
    assert calibrate.best(tried).cell.name == "c"


def test_settings_that_cannot_reach_the_target_are_given_up():
    assert search.hopeful([24, 23, 12, 0], 24, 0.98) == [0, 1]
    assert search.hopeful([1, 0], 1, 0.98) == [0] or search.hopeful([1, 0], 1, 0.7) == [0, 1]


def test_all_searched_settings_are_valid_and_have_names_of_their_own():
    cells = search.cells(list(range(30)), [256, 64])
    names = [cell.name for cell in cells]
    assert len(set(names)) == len(names) > 40
    assert all(cell.config() is not None for cell in cells)


def tiers_plan(keep, page=32, cold=112, bits=4, window=256):
    return TierPlan("t", page, cold, 224, 512, window, keep, 4, bits=bits)


@pytest.mark.parametrize("tokens", [2048, 8192, 40_000])
def test_no_other_interval_peaks_lower_and_of_equals_the_longest_is_taken(tokens):
    plans = [tiers_plan(0.5), *[tiers_plan(0.125)] * 2]

    def peak(every):
        return sum(peak_pages(replace(plan, interval=every), tokens) for plan in plans)

    found = interval.least_peak(plans, tokens)
    assert 224 <= found <= 448
    assert found % 32 == 0
    for other in range(224, 449, 32):
        assert peak(other) > peak(found) or (peak(other) == peak(found) and other <= found)


def test_a_window_of_whole_segments_is_collapsed_at_each_of_them():
    assert interval.least_peak([tiers_plan(0.25, window=224)], 8192) == 224


def test_the_profile_of_the_small_model_peaks_as_low_as_it_can():
    config = load("entropykv", f"{NAME}.json")
    tiers = make_tiers(config, range(30), 32, partial(capacity, 64, 32, 2))
    plans = [tier.plan for tier in tiers for _ in tier.layers]
    assert interval.least_peak(plans, 8192) == config.interval


def test_tiers_are_named_in_the_right_number():
    assert allocation.named(1, 0.5) == "1 layer keeps 0.5"
    assert allocation.named(3, 1.0) == "3 layers keep 1"


def test_the_command_that_serves_has_a_cache_of_16_bits(tmp_path):
    said = profile.command(tmp_path / "p.json")
    assert said.startswith("vllm serve MODEL --kv-cache-dtype bfloat16 --kv-eviction entropykv")
    assert said.endswith(f"--kv-eviction-config {tmp_path / 'p.json'}")


class Config:
    model_type, hidden_size, num_hidden_layers = "llama", 8, 4


def test_a_profile_is_settings_for_one_model(tmp_path):
    path = tmp_path / "p.json"
    tiers = allocation.tiers([2, 0, 1, 3], 2, 0.6)
    settings = {"policy": "entropykv", "keep": 0.5, "bits": 4, "tiers": tiers}
    profile.write(path, Config, "tiny", {0: 0.25, 1: 0.0}, settings)
    config = load("entropykv", str(path))
    assert config.profile.model == fingerprint(Config)
    assert config.profile.sensitivity == {0: 0.25, 1: 0.0}
    assert [tier.layers for tier in config.tiers] == [(0, 2), (1, 3)]
    assert json.loads(path.read_text())["tiers"][0]["layers"] == "0,2"


def test_another_model_has_another_fingerprint():
    class Wider(Config):
        hidden_size = 16

    class Named(Config):
        layer_types = ("full_attention",) * 4

    assert fingerprint(Config) != fingerprint(Wider)
    assert fingerprint(Config) == fingerprint(Named)


def test_signals_agree_with_a_scan_that_they_made():
    torch.manual_seed(0)
    rows = [(torch.randn(64, 2, 16), torch.randn(64, 2, 16) * (1 + i)) for i in range(6)]
    found = signals.measure(rows)
    (_, correlation, hits), *_ = signals.agreement(found, found["mean norm of values"], 2)
    assert (correlation, hits) == (pytest.approx(1), 2)
    inverse = [-value for value in found["mean norm of values"]]
    strongest = {n: (c, h) for n, c, h in signals.agreement(found, inverse, 2)}
    assert strongest["mean norm of values"] == (pytest.approx(-1), 2)
    assert all(len(values) == 6 for values in found.values())


def test_fewer_dimensions_are_seen():
    flat = torch.randn(64, 1, 1, generator=torch.Generator().manual_seed(0)) * torch.ones(16)
    full = torch.randn(64, 1, 16, generator=torch.Generator().manual_seed(0))
    found = signals.measure([(flat, full), (full, flat)])["dimensions of keys"]
    assert found[0] == pytest.approx(1, abs=1e-3)
    assert found[1] > 8


@pytest.mark.parametrize(("keep", "tops"), [(0.6, {1.0}), (0.5, {1.0}), (0.25, {1.0, 0.5})])
def test_each_tier_is_tried_once_and_keeps_at_most_all(keep, tops):
    args = SimpleNamespace(keep=keep, bits=4, window=256)
    cells = calibrate.candidates(args, list(range(30)))[1:]
    names = [cell.name for cell in cells]
    assert len(set(names)) == len(names) > 1
    assert all(cell.config() is not None for cell in cells)
    assert {cell.eviction["tiers"][0]["keep"] for cell in cells[1:]} == tops


def test_a_profile_of_another_model_is_refused_even_if_its_layers_are_as_many(tmp_path):
    class Wider(Config):
        hidden_size = 16

    path = str(tmp_path / "p.json")
    settings = {"policy": "entropykv", "keep": 0.5}
    profile.write(Path(path), Config, "tiny", {0: 0.25, 1: 0.5}, settings)
    args = SimpleNamespace(profile=path)

    def net(config):
        return SimpleNamespace(
            full=[0, 1],
            net=SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: config)),
        )

    assert race.order_of(args, net(Config), [], None) == [1, 0]
    with pytest.raises(ValueError, match=r"p\.json is not a profile that this model"):
        race.order_of(args, net(Wider), [], None)
