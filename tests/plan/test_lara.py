# SPDX-License-Identifier: Apache-2.0
"""LARA and tiers: equal totals whatever the strength, equal groups without padding."""

import math
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from entropykv_vllm.config.settings import EvictionConfig, TierConfig
from entropykv_vllm.plan import lara, pyramid
from entropykv_vllm.plan.capacity import capacity
from entropykv_vllm.plan.tiers import group_size
from entropykv_vllm.plan.tiers import make_tiers as make_tiers_of

PAGE = 32
LENGTHS = range(1, 129)


def make_tiers(config, layers, page, head_size=64, item_bytes=2):
    return make_tiers_of(config, layers, page, partial(capacity, head_size, page, item_bytes))


@pytest.mark.parametrize("layers", LENGTHS)
def test_the_curve_has_mean_one_and_its_least_value_in_the_middle(layers):
    shape = lara.curve(layers)
    assert math.isclose(sum(shape) / layers, 1)
    assert shape == shape[::-1]
    assert min(shape) == shape[layers // 2]


@pytest.mark.parametrize("layers", LENGTHS)
def test_the_pyramid_has_mean_one_and_falls(layers):
    shape = pyramid.curve(layers)
    assert math.isclose(sum(shape) / layers, 1)
    assert shape == sorted(shape, reverse=True)
    assert layers == 1 or math.isclose(shape[-1], pyramid.LAST)


def test_thirty_layers_make_a_pyramid_of_five_parts():
    tiers = make_tiers(EvictionConfig(curve="pyramid", lara_keep=0.5, keep=0.4), range(30), PAGE)
    keeps = [tier.plan.keep for tier in tiers]
    assert [len(tier.layers) for tier in tiers] == [6] * 5
    assert keeps == sorted(keeps, reverse=True)
    assert keeps[0] > 0.5
    assert keeps[-1] < 0.3


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
@pytest.mark.parametrize("curve", ["lara", "pyramid"])
def test_tiers_cover_each_layer_once_in_groups_of_equal_size(layers, curve):
    tiers = make_tiers(EvictionConfig(lara_keep=0.3, curve=curve), range(layers), PAGE)
    assert sorted(i for tier in tiers for i in tier.layers) == list(range(layers))
    smallest = min(len(tier.layers) for tier in tiers)
    assert all(len(tier.layers) % smallest == 0 for tier in tiers)


@pytest.mark.parametrize("layers", LENGTHS)
@pytest.mark.parametrize("curve", ["lara", "pyramid"])
@pytest.mark.parametrize("strength", [-0.7, 0.3, 1.5])
def test_tiers_hold_the_same_in_total(layers, strength, curve):
    config = EvictionConfig(keep=0.3, lara_keep=strength, lara_window=strength, curve=curve)
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
    assert not retrieval.plan.compresses
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


@pytest.mark.parametrize(
    ("page", "settings", "sentence"),
    [
        (32, {"segment": 100}, r"segment must be whole pages, .* set .*\.segment to 128, or leave"),
        (32, {"segment": 256, "bits": 4}, r"of 32 tokens when new and of 112 .*\.segment to 448,"),
        (32, {"cap": 31}, r"room for one old page of 32 tokens, and 31 has not"),
        (32, {"cap": 111, "bits": 4}, r"room for one old page of 112 tokens.*cap to 112 or more"),
        (32, {"sinks": 33}, "sinks must fit one page of 32 tokens, and 33 do not"),
        (16, {"bits": 8}, "set a larger --block-size, such as 32"),
    ],
)
def test_lengths_that_do_not_fit_the_pages_are_refused_in_words(page, settings, sentence):
    with pytest.raises(ValueError, match=sentence) as caught:
        make_tiers(EvictionConfig(**settings), range(4), page)
    assert "\n" not in str(caught.value)


def test_nothing_fits_a_page_without_room():
    with pytest.raises(ValueError, match=r"would hold 0 of 4 bits.*larger --block-size"):
        make_tiers_of(EvictionConfig(bits=4), range(4), 32, lambda bits: 32 if bits == 16 else 0)


@pytest.mark.parametrize("head_size", [32, 48, 64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("item_bytes", [2, 4])
@pytest.mark.parametrize("page", [16, 32, 64, 128])
@pytest.mark.parametrize("bits", [16, 8, 4])
def test_the_automatic_segment_is_whole_pages_near_256_tokens(head_size, item_bytes, page, bits):
    cold = capacity(head_size, page, item_bytes, bits)
    if bits < 16 and cold <= page:
        return
    config = EvictionConfig(bits=bits)
    (tier,) = make_tiers(config, range(4), page, head_size, item_bytes)
    unit = math.lcm(page, cold)
    assert (tier.plan.cold, tier.plan.segment % unit) == (cold, 0)
    assert abs(tier.plan.segment - 256) <= max(unit / 2, unit - 256)


def test_a_cache_of_32_bits_holds_twice_as_many_quantized_tokens():
    (half,) = make_tiers(EvictionConfig(bits=4), range(4), PAGE, item_bytes=2)
    (single,) = make_tiers(EvictionConfig(bits=4), range(4), PAGE, item_bytes=4)
    assert (half.plan.cold, single.plan.cold) == (112, 224)


def test_tiers_may_differ_in_bits():
    tiers = (
        TierConfig(name="exact", layers="0", bits=16),
        TierConfig(name="rest", layers="1-3", keep=0.5),
    )
    config = EvictionConfig(keep=1.0, bits=4, tiers=tiers)
    exact, rest = (tier.plan for tier in make_tiers(config, range(4), PAGE))
    assert (exact.bits, exact.cold, exact.segment, exact.compresses) == (16, 32, 256, False)
    assert (rest.bits, rest.cold, rest.segment, rest.compresses) == (4, 112, 224, True)
    with pytest.raises(ValueError, match=r"of 32 or 112 when old, and 300 is not: .* to 448"):
        make_tiers(config.model_copy(update={"segment": 300}), range(4), PAGE)


def test_a_model_without_full_attention_is_refused():
    with pytest.raises(ValueError, match="nothing to evict"):
        make_tiers(EvictionConfig(), [], PAGE)


@given(st.integers(1, 128))
def test_the_group_size_divides_the_layers(layers):
    assert layers % group_size(layers) == 0


def test_intervals_are_rounded_up_to_whole_pages():
    (tier,) = make_tiers(EvictionConfig(interval=224, bits=8), range(4), 64)
    assert tier.plan.interval == 256
