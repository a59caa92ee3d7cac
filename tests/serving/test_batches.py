# SPDX-License-Identifier: Apache-2.0
"""Moves carried out together give what they give one by one."""

from hypothesis import given
from hypothesis import strategies as st

from entropykv_vllm.pages.moves import PageMove
from entropykv_vllm.serving.worker import batches


@st.composite
def plans(draw):
    """Moves over few pages, so that they often read, write and reuse each other's."""
    moves = []
    for order in range(draw(st.integers(0, 12))):
        src = draw(st.lists(st.integers(1, 12), min_size=2, max_size=4, unique=True))
        dst = draw(st.lists(st.integers(1, 12), min_size=1, max_size=len(src) - 1, unique=True))
        group = draw(st.integers(0, 1))
        moves.append(PageMove(order, group, "r", tuple(range(len(src))), tuple(src), tuple(dst), 0))
    return moves


def one_by_one(moves):
    memory = {page: f"page {page}" for page in range(1, 13)}
    for move in moves:
        read = [memory[page] for page in move.src]
        memory.update({page: f"{i} of {read}" for i, page in enumerate(move.dst)})
    return memory


def together(moves):
    memory = {page: f"page {page}" for page in range(1, 13)}
    for batch in batches(moves):
        reads = [[memory[page] for page in move.src] for move in batch]
        for move, read in zip(batch, reads, strict=True):
            memory.update({page: f"{i} of {read}" for i, page in enumerate(move.dst)})
    return memory


@given(plans())
def test_batches_give_what_single_moves_give(moves):
    assert together(moves) == one_by_one(moves)


@given(plans())
def test_a_batch_has_one_group_one_shape_and_no_page_written_twice(moves):
    found = batches(moves)
    assert [move for batch in found for move in batch] == moves
    for batch in found:
        assert len({(move.group, len(move.src), len(move.dst)) for move in batch}) == 1
        written = [page for move in batch for page in move.dst]
        assert len(written) == len(set(written))
