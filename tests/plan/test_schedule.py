# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of segments and boundaries, against a page-by-page replay."""

import math
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from entropykv_vllm.plan.schedule import (
    TierPlan,
    boundary,
    cold_count,
    cold_pages,
    collapsed_segments,
    held_pages,
    held_tokens,
    hot_start,
    moves,
    newest_runs,
    next_boundary,
    peak_pages,
    run_pages,
)

PAGE = 4
UNIT = st.floats(0, 1)


@st.composite
def plans(draw, keep=UNIT, cap=True, bits=(16, 8, 4), protect=True):
    page = draw(st.sampled_from([1, 4, 16]))
    bits = draw(st.sampled_from(bits))
    cold = page if bits == 16 else draw(st.integers(page + 1, 4 * page))
    unit = math.lcm(page, cold)
    ends = st.lists(st.integers(0, 12), max_size=6, unique=True) if protect else st.just([])
    ranges = sorted(draw(ends))
    protected = tuple(zip(ranges[::2], ranges[1::2], strict=False))
    return TierPlan(
        name="t",
        page=page,
        cold=cold,
        segment=unit * draw(st.integers(1, max(1, 8 * page // unit))),
        interval=page * draw(st.integers(1, 12)),
        window=draw(st.integers(page, 20 * page)),
        keep=draw(keep),
        sinks=0 if protected[:1] and not protected[0][0] else draw(st.integers(0, page)),
        cap=draw(st.integers(cold, 10 * cold)) if cap and draw(st.booleans()) else None,
        bits=bits,
        protected=protected,
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
    """A plain page is a hot one that was never moved; a quantized one is never plain."""
    tokens = pages * plan.page
    table, _ = replay(plan, tokens)
    at = boundary(plan, tokens)
    stated = {cold.entry: cold for cold in cold_pages(plan, at)}
    for entry, content in table.items():
        if entry * plan.page >= hot_start(plan, at):
            assert content == "hot"
        elif stated[entry].kind == "plain":
            assert plan.bits == 16
            assert content == "hot" or content == stated[entry]
        else:
            assert content == stated[entry]
    hot = set(range(hot_start(plan, at) // plan.page, math.ceil(tokens / plan.page)))
    assert set(table) == set(stated) | hot
    assert len(stated) == cold_count(plan, at)
    assert len(table) == held_pages(plan, at, tokens)
    assert held_tokens(plan, at, tokens) == len(stated) * plan.cold + tokens - hot_start(plan, at)


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


@given(plans(keep=st.floats(0.01, 1), cap=False, protect=False), st.integers(1, 200))
def test_any_keep_ratio_is_met_on_average(plan, segments):
    at = plan.interval * math.ceil((plan.window + segments * plan.segment) / plan.interval)
    whole, rest = divmod(collapsed_segments(plan, at), 2**plan.levels)
    exact = plan.share * 2**plan.levels * whole
    pages = cold_pages(plan, at)
    assert len(pages) == cold_count(plan, at)
    assert exact - 1e-5 <= len(pages) - rest.bit_count() < exact + 1 + 1e-5


@given(plans(keep=st.floats(0.01, 1), cap=False), st.integers(1, 200))
def test_no_part_of_the_text_is_dropped_unseen(plan, segments):
    """Each run of segments that are merged together leaves a page or more."""
    assert plan.share * 2**plan.levels >= 1 - 1e-6
    assert not plan.levels or plan.share * 2 ** (plan.levels - 1) < 1
    for start, level in reversed(list(newest_runs(plan, segments))):
        assert run_pages(plan, start, level)


@given(plans(), st.integers(1, 100))
def test_sinks_fit_the_pages_that_must_hold_them(plan, step):
    for move in moves(plan, step * plan.interval):
        assert move.sinks <= len(move.dst) * plan.cold
        assert {cold.entry for cold in move.dst} <= set(move.src)
        assert len(move.dst) < len(move.src)
        read = plan.page if move.kind == "collapse" else plan.cold
        assert len(move.dst) * plan.cold <= len(move.src) * read, "more tokens than there were"


@given(plans(), st.integers(1, 60))
def test_the_first_tokens_stay_in_each_move_that_reads_them(plan, step):
    for at in range(plan.interval, (step + 1) * plan.interval, plan.interval):
        for move in moves(plan, at):
            assert move.sinks == (plan.sinks if 0 in move.src else 0)


@given(plans(keep=st.floats(0.01, 0.2), cap=False, protect=False), st.data())
def test_merges_of_the_first_tokens_keep_them(plan, data):
    """Few plans merge, and only as often as a page is less than what two segments keep."""
    plan = replace(plan, sinks=data.draw(st.integers(1, plan.page)))
    reach = plan.segment * 2**plan.levels + plan.window + 2 * plan.interval
    found = [
        move
        for at in range(plan.interval, reach, plan.interval)
        for move in moves(plan, at)
        if move.kind == "merge" and 0 in move.src
    ]
    assume(found)
    assert {move.sinks for move in found} == {plan.sinks}


@given(plans(), st.integers(1, 100))
def test_a_collapse_reads_hot_pages_and_the_others_cold_ones(plan, step):
    at = step * plan.interval
    before = hot_start(plan, at - plan.interval) // plan.page
    cold = {page.entry for page in cold_pages(plan, at - plan.interval)}
    for move in moves(plan, at):
        if move.kind == "collapse":
            assert min(move.src) >= before
            cold.update(page.entry for page in move.dst)
        elif move.kind == "merge":
            assert plan.cap is None
            cold.update(range(before, hot_start(plan, at) // plan.page) if plan.bits == 16 else ())
            assert set(move.src) <= cold
            cold -= set(move.src)
            cold.update(page.entry for page in move.dst)
        else:
            assert plan.cap is not None
            cold.update(range(before, hot_start(plan, at) // plan.page) if plan.bits == 16 else ())
            assert set(move.src) <= cold


@given(plans(keep=st.just(1.0), cap=False, bits=(8, 4)), st.integers(0, 300))
def test_quantizing_alone_loses_no_token(plan, pages):
    tokens = pages * plan.page
    at = boundary(plan, tokens)
    assert plan.compresses
    assert held_tokens(plan, at, tokens) == tokens
    assert all(move.kind == "collapse" for move in moves(plan, at) if at)
    assert peak_pages(plan, tokens) <= max(1, pages)


@given(plans(), st.integers(1, 60))
def test_a_cold_page_is_named_by_tokens_that_exist(plan, step):
    at = step * plan.interval
    names = [(c.anchor, c.kind, c.index) for c in cold_pages(plan, at)]
    assert len(set(names)) == len(names)
    assert all((anchor + 1) * plan.page <= at for anchor, _, _ in names)


def test_keep_of_one_without_a_cap_moves_nothing():
    plan = TierPlan("t", PAGE, PAGE, 16, 32, 8, 1.0, 4)
    assert not plan.compresses
    assert all(not moves(plan, at) for at in range(32, 4096, 32))
    assert peak_pages(plan, 4096) == 4096 // PAGE


def test_sinks_and_window_alone_hold_constant_pages():
    plan = TierPlan("t", PAGE, PAGE, 16, 32, 64, 0.0, 4)
    assert peak_pages(plan, 10_000) == peak_pages(plan, 1_000) <= 1 + (64 + 16 + 32) // PAGE


def test_a_long_capped_context_is_planned_without_recursion_limits():
    plan = TierPlan("t", 32, 32, 256, 512, 256, 0.5, 4, cap=1024)
    assert cold_count(plan, 512 * 4000) == len(cold_pages(plan, 512 * 4000)) == 32


def test_a_cap_is_whole_cold_pages():
    plan = TierPlan("t", 32, 112, 224, 224, 224, 1.0, 4, cap=1200, bits=4)
    (*_, drop) = moves(plan, 224 * 50)
    assert (drop.kind, len(drop.dst)) == ("drop", 10)
    assert cold_count(plan, 224 * 50) == 10


def test_four_bits_take_two_pages_where_seven_were():
    plan = TierPlan("t", 32, 112, 224, 224, 224, 1.0, 4, bits=4)
    (move,) = moves(plan, 448)
    assert (move.src, [c.entry for c in move.dst]) == (tuple(range(7)), [0, 1])
    assert {(c.kind, c.anchor) for c in move.dst} == {("segment", 6)}


@pytest.mark.parametrize(("tokens", "expected"), [(0, 32), (31, 32), (32, 64)])
def test_the_next_boundary_lies_ahead(tokens, expected):
    assert next_boundary(32, tokens) == expected


def test_small_shares_are_merged_as_in_a_binary_counter():
    """A page holds 112 tokens, a sixteenth of 1,792: eight segments of 224."""
    plan = TierPlan("t", 32, 112, 224, 224, 224, 1 / 16, 4, bits=4)
    assert plan.levels == 3
    kinds = [[move.kind for move in moves(plan, 224 * n)] for n in range(2, 10)]
    assert [len(k) for k in kinds] == [1, 2, 1, 3, 1, 2, 1, 4]
    (page,) = cold_pages(plan, 224 * 9)
    assert (page.entry, page.anchor, page.kind, page.index) == (0, 55, "merge", 3)
    assert [p.index for p in cold_pages(plan, 224 * 8)] == [2, 1, 0]
