# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of segments and boundaries, against a page-by-page replay."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from entropykv_vllm.plan.schedule import (
    TierPlan,
    boundary,
    cold_count,
    cold_pages,
    held_pages,
    hot_start,
    moves,
    next_boundary,
    peak_pages,
    segment_pages,
    survivors,
)

PAGE = 4
UNIT = st.floats(0, 1)


@st.composite
def plans(draw, keep=UNIT, cap=True):
    page = draw(st.sampled_from([1, 4, 16]))
    return TierPlan(
        name="t",
        page=page,
        segment=page * draw(st.integers(1, 8)),
        interval=page * draw(st.integers(1, 12)),
        window=draw(st.integers(page, 20 * page)),
        keep=draw(keep),
        sinks=draw(st.integers(0, page)),
        cap=page * draw(st.integers(1, 10)) if cap and draw(st.booleans()) else None,
    )


def replay(plan, tokens):
    """Hold pages one by one and carry out each move: the state after `tokens`, and the peak."""
    table: dict[int, object] = {}
    peak = 0
    for at in range(0, tokens + 1, plan.interval):
        if at:
            for move in moves(plan, at):
                assert all(entry in table for entry in move.src), "a move reads a hole"
                for entry in move.src:
                    del table[entry]
                for cold in move.dst:
                    table[cold.entry] = cold
        end = min(at + plan.interval, tokens)
        for entry in range(at // plan.page, math.ceil(end / plan.page)):
            table[entry] = "hot"
        peak = max(peak, len(table))
    return table, peak


@given(plans(), st.integers(0, 60))
def test_moves_lead_from_each_boundary_to_the_state_of_the_next(plan, pages):
    tokens = pages * plan.page
    table, _ = replay(plan, tokens)
    at = boundary(plan, tokens)
    stated = {cold.entry: cold for cold in cold_pages(plan, at)}
    for entry, content in table.items():
        if entry * plan.page >= hot_start(plan, at):
            assert content == "hot"
        elif stated[entry].kind == "plain":
            assert content == "hot" or content == stated[entry]
        else:
            assert content == stated[entry]
    hot = set(range(hot_start(plan, at) // plan.page, math.ceil(tokens / plan.page)))
    assert set(table) == set(stated) | hot
    assert len(stated) == cold_count(plan, at)
    assert len(table) == held_pages(plan, at, tokens)


@given(plans(), st.integers(1, 80), st.integers(0, 3))
def test_the_peak_is_reached_and_never_passed(plan, pages, extra):
    tokens = max(1, pages * plan.page - extra)
    assert replay(plan, tokens)[1] == peak_pages(plan, tokens)


@given(plans(), st.integers(0, 400))
def test_the_window_is_never_touched(plan, pages):
    at = boundary(plan, pages * plan.page)
    assert hot_start(plan, at) <= max(0, at - plan.window)
    for move in moves(plan, at) if at else ():
        assert max(move.src) * plan.page < max(0, at - plan.window)


@given(plans(keep=st.floats(0.01, 1), cap=False), st.integers(1, 200))
def test_any_keep_ratio_is_met_on_average(plan, segments):
    kept = sum(len(segment_pages(plan, s)) for s in range(segments))
    exact = plan.keep * plan.segment_pages * segments
    assert kept == survivors(plan, segments)
    assert exact - 1e-5 <= kept < exact + 1 + 1e-5


@given(plans(), st.integers(1, 100))
def test_sinks_fit_the_pages_that_must_hold_them(plan, step):
    for move in moves(plan, step * plan.interval):
        assert move.sinks <= len(move.dst) * plan.page
        assert {cold.entry for cold in move.dst} <= set(move.src)
        assert len(move.dst) < len(move.src)


@given(plans(), st.integers(1, 60))
def test_a_cold_page_is_named_by_tokens_that_exist(plan, step):
    at = step * plan.interval
    names = [(c.anchor, c.kind, c.index) for c in cold_pages(plan, at)]
    assert len(set(names)) == len(names)
    assert all((anchor + 1) * plan.page <= at for anchor, _, _ in names)


def test_keep_of_one_without_a_cap_moves_nothing():
    plan = TierPlan("t", PAGE, 16, 32, 8, 1.0, 4)
    assert not plan.evicts
    assert all(not moves(plan, at) for at in range(32, 4096, 32))
    assert peak_pages(plan, 4096) == 4096 // PAGE


def test_sinks_and_window_alone_hold_constant_pages():
    plan = TierPlan("t", PAGE, 16, 32, 64, 0.0, 4)
    assert peak_pages(plan, 10_000) == peak_pages(plan, 1_000) <= 1 + (64 + 16 + 32) // PAGE


def test_a_long_capped_context_is_planned_without_recursion_limits():
    plan = TierPlan("t", 32, 256, 512, 256, 0.5, 4, cap=1024)
    assert cold_count(plan, 512 * 4000) == len(cold_pages(plan, 512 * 4000)) == 32


@pytest.mark.parametrize(("tokens", "expected"), [(0, 32), (31, 32), (32, 64)])
def test_the_next_boundary_lies_ahead(tokens, expected):
    assert next_boundary(32, tokens) == expected
