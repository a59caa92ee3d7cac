# SPDX-License-Identifier: Apache-2.0
"""LARA and tiers: equal totals whatever the strength, equal groups without padding."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from entropykv_vllm.config.settings import EvictionConfig, TierConfig
from entropykv_vllm.plan import lara
from entropykv_vllm.plan.tiers import group_size, make_tiers

PAGE = 32
LENGTHS = range(1, 129)


@pytest.mark.parametrize("layers", LENGTHS)
def test_the_curve_has_mean_one_and_its_least_value_in_the_middle(layers):
    shape = lara.curve(layers)
    assert math.isclose(sum(shape) / layers, 1)
    assert shape == shape[::-1]
    assert min(shape) == shape[layers // 2]


@given(st.integers(1, 128), st.floats(0.01, 1), st.floats(-3, 3))
def test_a_total_does_not_depend_on_the_strength(layers, keep, strength):
    values = lara.allocate(keep, strength, lara.curve(layers), 0.0, 1.0)
    assert math.isclose(sum(values), keep * layers, rel_tol=1e-6)
    assert all(0 <= value <= 1 for value in values)


def test_positive_strength_favours_the_ends_and_negative_the_middle():
    ends = lara.allocate(0.5, 0.5, lara.curve(12), 0, 1)
    middle = lara.allocate(0.5, -0.5, lara.curve(12), 0, 1)
    assert ends[0] > 0.5 > ends[6]
    assert middle[0] < 0.5 < middle[6]


@pytest.mark.parametrize("layers", LENGTHS)
def test_tiers_cover_each_layer_once_in_groups_of_equal_size(layers):
    tiers = make_tiers(EvictionConfig(lara_keep=0.3), range(layers), PAGE)
    assert sorted(i for tier in tiers for i in tier.layers) == list(range(layers))
    smallest = min(len(tier.layers) for tier in tiers)
    assert all(len(tier.layers) % smallest == 0 for tier in tiers)


@pytest.mark.parametrize("layers", LENGTHS)
@pytest.mark.parametrize("strength", [-0.7, 0.3, 1.5])
def test_tiers_hold_the_same_in_total(layers, strength):
    config = EvictionConfig(keep=0.3, lara_keep=strength, lara_window=strength)
    tiers = make_tiers(config, range(layers), PAGE)
    kept = sum(tier.plan.keep * len(tier.layers) for tier in tiers)
    windows = sum(tier.plan.window * len(tier.layers) for tier in tiers)
    assert math.isclose(kept, 0.3 * layers, rel_tol=1e-6)
    assert abs(windows - config.window * layers) <= layers / 2  # whole tokens


def test_thirty_layers_give_groups_of_six():
    sizes = [
        len(tier.layers) for tier in make_tiers(EvictionConfig(lara_keep=0.3), range(30), PAGE)
    ]
    assert sizes == [6, 18, 6]


def test_strength_zero_is_one_tier():
    (tier,) = make_tiers(EvictionConfig(), range(30), PAGE)
    assert tier.layers == tuple(range(30))


def test_layers_of_a_hybrid_model_keep_their_index():
    tiers = make_tiers(EvictionConfig(lara_keep=0.2), [5, 11, 17, 23, 29, 35], PAGE)
    assert [tier.layers for tier in tiers] == [(5,), (11, 17, 23, 29), (35,)]


def test_tiers_by_hand_may_be_any_sets():
    config = EvictionConfig(
        keep=0.2,
        tiers=(
            TierConfig(name="retrieval", layers="7,18,20,23", keep=1.0),
            TierConfig(name="rest", layers="0-6,8-17,19,21-22,24-29", window=64),
        ),
    )
    retrieval, rest = make_tiers(config, range(30), PAGE)
    assert retrieval.layers == (7, 18, 20, 23)
    assert not retrieval.plan.evicts
    assert (rest.plan.keep, rest.plan.window) == (0.2, 64)
    assert len(rest.layers) == 26


@pytest.mark.parametrize(
    ("tiers", "sentence"),
    [
        ([("a", "0-3")], "no tier has the layers 4-5"),
        ([("a", "0-3"), ("b", "3-5")], "layer 3 is in two tiers, 'a' and 'b'"),
        ([("a", "0-6")], "names layer 6"),
    ],
)
def test_wrong_tiers_are_refused_in_words(tiers, sentence):
    config = EvictionConfig(tiers=tuple(TierConfig(name=n, layers=ls) for n, ls in tiers))
    with pytest.raises(ValueError, match=sentence):
        make_tiers(config, range(6), PAGE)


@pytest.mark.parametrize("name", ["segment", "interval", "cap"])
def test_lengths_must_be_whole_pages(name):
    with pytest.raises(ValueError, match=f"{name} must be a multiple of the page size"):
        make_tiers(EvictionConfig(**{name: 100}), range(4), PAGE)


def test_a_model_without_full_attention_is_refused():
    with pytest.raises(ValueError, match="nothing to evict"):
        make_tiers(EvictionConfig(), [], PAGE)


@given(st.integers(1, 128))
def test_the_group_size_divides_the_layers(layers):
    assert layers % group_size(layers) == 0
