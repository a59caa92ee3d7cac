# SPDX-License-Identifier: Apache-2.0
"""Moves that run as one call leave what they would one by one."""

from hypothesis import given, settings
from hypothesis import strategies as st

from entropykv_vllm.pages.moves import PageMove
from entropykv_vllm.pages.waves import apart, waves

PAGES = 12


@st.composite
def page_moves(draw, order):
    """Any pages, so that moves depend on each other in every way there is."""
    src = draw(st.lists(st.integers(1, PAGES), min_size=1, max_size=3, unique=True))
    dst = draw(st.lists(st.integers(1, PAGES), max_size=len(src), unique=True))
    return PageMove(
        order=order,
        group=draw(st.integers(0, 1)),
        request_id="a",
        entries=tuple(range(len(src))),
        src=tuple(src),
        dst=tuple(dst),
        sinks=0,
        kind=draw(st.sampled_from(["collapse", "drop"])),
    )


@st.composite
def steps(draw):
    return [draw(page_moves(i)) for i in range(draw(st.integers(0, 12)))]


def outcome(move, pages):
    """What a move writes, a function of all that it reads."""
    read = tuple(pages[page] for page in move.src)
    return {page: (move.order, i, hash(read)) for i, page in enumerate(move.dst)}


def one_by_one(moves):
    pages = {page: page for page in range(1, PAGES + 1)}
    for move in moves:
        pages |= outcome(move, pages)
    return pages


def call_by_call(calls):
    """All reads of a call come first, then its writes in any order: here backwards."""
    pages = {page: page for page in range(1, PAGES + 1)}
    for call in calls:
        for made in reversed([outcome(move, pages) for move in call]):
            pages |= made
    return pages


def at_once(call):
    """The same by a call whose every move writes before the next one reads."""
    return call_by_call([[move] for move in call])


@settings(max_examples=300, deadline=None)
@given(steps())
def test_pages_hold_what_they_would_one_by_one(moves):
    assert call_by_call(waves(moves)) == one_by_one(moves)


@settings(deadline=None)
@given(steps())
def test_every_move_is_in_one_call_of_its_shape(moves):
    calls = waves(moves)
    assert sorted(m.order for call in calls for m in call) == [m.order for m in moves if m.dst]
    for call in calls:
        assert len({(m.group, m.kind, len(m.src), len(m.dst)) for m in call}) == 1
        assert [m.order for m in call] == sorted(m.order for m in call)
        written = [page for m in call for page in m.dst]
        assert len(written) == len(set(written))


@settings(deadline=None)
@given(steps())
def test_a_call_that_is_apart_may_write_in_any_order(moves):
    for call in waves(moves):
        if apart(call):
            assert at_once(call) == at_once(call[::-1]) == call_by_call([call])


def move(order, src, dst):
    entries = tuple(range(len(src)))
    return PageMove(order, 0, "a", entries, tuple(src), tuple(dst), 0)


def test_requests_of_a_step_share_a_call():
    moves = [move(i, [10 * i + 1, 10 * i + 2], [10 * i + 1]) for i in range(8)]
    assert waves(moves) == [moves]
    assert not apart(moves)


def test_what_one_frees_another_fills_in_the_same_call():
    moves = [move(0, [1, 2], [1]), move(1, [3, 4], [2])]
    assert waves(moves) == [moves]


def test_what_one_fills_another_reads_in_a_later_call():
    moves = [move(0, [1, 2], [1]), move(1, [1, 3], [5]), move(2, [7, 8], [9])]
    assert waves(moves) == [[moves[0], moves[2]], [moves[1]]]
