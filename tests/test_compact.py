# SPDX-License-Identifier: Apache-2.0
"""Tables lose their holes, in order, and nothing else changes."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from entropykv_vllm.attention.compact import compact

INT32 = torch.int32


@st.composite
def requests(draw):
    """Rows of page ids with holes before the last page, and rows of padding."""
    block_size = draw(st.sampled_from([1, 16, 32]))
    width = draw(st.integers(1, 12))
    rows, lens = [], []
    for _ in range(draw(st.integers(1, 6))):
        pages = draw(st.integers(0, width))
        last = draw(st.integers(1, block_size))
        row = draw(st.lists(st.integers(0, 3), min_size=width, max_size=width))
        if pages:
            row[pages - 1] = draw(st.integers(1, 3))  # the hot page is never a hole
        rows.append(row)
        lens.append((pages - 1) * block_size + last if pages else 0)
    return rows, lens, block_size


def loop(rows, lens, block_size):
    """The same in plain Python."""
    table, shorter = [], []
    for row, length in zip(rows, lens, strict=True):
        used = row[: -(-length // block_size)]
        kept = [page for page in used if page]
        table.append(kept + [0] * (len(row) - len(kept)))
        shorter.append(length - block_size * used.count(0))
    return table, shorter


@settings(deadline=None)
@given(requests())
def test_equals_a_plain_loop(case):
    rows, lens, block_size = case
    table, seq_lens = torch.tensor(rows, dtype=INT32), torch.tensor(lens, dtype=INT32)
    new_table, new_lens = compact(table, seq_lens, block_size)

    # vLLM shares these between groups: they may not be written.
    assert table.tolist() == rows
    assert seq_lens.tolist() == lens
    expected_table, expected_lens = loop(rows, lens, block_size)
    assert new_lens.tolist() == expected_lens
    assert new_table.dtype == new_lens.dtype == INT32
    if expected_lens == lens:
        assert new_table is table
        assert new_lens is seq_lens
    else:
        assert new_table.tolist() == expected_table
    for row, length in zip(new_table.tolist(), new_lens.tolist(), strict=True):
        used = row[: -(-length // block_size)]
        assert all(used), "an attended page is the null page"


@settings(deadline=None)
@given(requests())
def test_compacting_twice_changes_nothing(case):
    rows, lens, block_size = case
    once = compact(torch.tensor(rows, dtype=INT32), torch.tensor(lens, dtype=INT32), block_size)
    table, seq_lens = compact(*once, block_size)
    assert table is once[0]
    assert seq_lens is once[1]


def test_tables_without_holes_stay_the_same_objects():
    table = torch.tensor([[1, 2, 0], [3, 0, 0], [0, 0, 0]], dtype=INT32)
    seq_lens = torch.tensor([33, 1, 0], dtype=INT32)
    assert all(a is b for a, b in zip(compact(table, seq_lens, 32), (table, seq_lens), strict=True))


def test_rows_of_a_wider_buffer():
    """vLLM hands out the first rows and columns of one large buffer."""
    buffer = torch.full((4, 8), 7, dtype=INT32)
    buffer[0, :4] = torch.tensor([5, 0, 0, 6])
    table, seq_lens = compact(buffer[:2, :4], torch.tensor([100, 128], dtype=INT32), 32)
    assert table.tolist() == [[5, 6, 0, 0], [7, 7, 7, 7]]
    assert seq_lens.tolist() == [36, 128]
    assert buffer[0].tolist() == [5, 0, 0, 6, 7, 7, 7, 7]
