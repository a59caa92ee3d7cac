# SPDX-License-Identifier: Apache-2.0
"""The stretches of a request's old tokens: they cover all of them, and hold what the plan holds."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entropykv_vllm.plan.bands import bands
from entropykv_vllm.plan.request import Control, joined, request_plan
from entropykv_vllm.plan.schedule import TierPlan, cold_count, hot_start


@st.composite
def plans(draw) -> TierPlan:
    page = draw(st.sampled_from([16, 32]))
    cold = page * draw(st.sampled_from([1, 2, 3]))
    segment = cold * draw(st.integers(1, 4))
    cap = draw(st.none() | st.integers(1, 6).map(lambda pages: pages * cold))
    keep = draw(st.sampled_from([1.0, 0.5, 0.3, 0.1, 0.03]))
    bits = 16 if cold == page else 4
    interval = page * draw(st.integers(1, 20))
    plan = TierPlan("t", page, cold, segment, interval, 5 * page, keep, 4, cap, bits)
    spans = draw(st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 900)), max_size=3))
    return request_plan(plan, Control(protect=joined((a, a + n) for a, n in spans)))


@given(plans(), st.integers(0, 200))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_bands_lie_side_by_side_and_add_up_to_the_tokens_in_cold_pages(plan, step):
    at = step * plan.interval
    found = bands(plan, at)
    assert [band.first for band in found] == [0, *(band.end for band in found)][: len(found)]
    assert (found[-1].end if found else 0) == hot_start(plan, at)
    held = sum((band.end - band.first) * band.share for band in found)
    assert held == pytest.approx(cold_count(plan, at) * plan.cold)


def test_what_is_protected_is_held_whole():
    plan = TierPlan("t", 16, 16, 64, 64, 0, 1 / 16, 4)
    found = bands(request_plan(plan, Control(protect=((64, 128),))), 6 * 64)
    assert (64, 128, 1.0) in [(b.first, b.end, b.share) for b in found]


def test_merged_segments_are_one_band():
    plan = TierPlan("t", 16, 16, 64, 64, 0, 1 / 16, 4)
    assert [(b.first, b.end) for b in bands(plan, 5 * 64)] == [(0, 256), (256, 320)]
