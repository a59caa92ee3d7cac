# SPDX-License-Identifier: Apache-2.0
"""Reading traces, and what is said about wrong ones."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from entropykv_vllm.simulation.read import read_trace
from entropykv_vllm.simulation.synthetic import Synthetic, make_synthetic, parse_synthetic
from entropykv_vllm.simulation.trace import Request, page_names

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:51.2224670,879,55
"""
MOONCAKE = [
    {"timestamp": 0, "input_length": 1100, "output_length": 9, "hash_ids": [0, 1, 2]},
    {"timestamp": 277, "input_length": 1500, "output_length": 0, "hash_ids": [0, 1, 3]},
    {"timestamp": 471, "input_length": 600, "output_length": 5, "hash_ids": [4, 1]},
]


def write(folder, text):
    path = folder / "trace"
    path.write_text(text)
    return path


def lines(rows):
    return "".join(f"{json.dumps(row)}\n" for row in rows)


def test_azures_rows_are_requests_that_share_nothing(tmp_path):
    found = read_trace(write(tmp_path, AZURE))
    assert [(one.prompt, one.output, one.shared) for one in found] == [
        (374, 44, ()),
        (396, 109, ()),
        (879, 55, ()),
    ]
    assert [one.arrival for one in found] == pytest.approx([0, 4.314579, 4.541877])


def test_azures_times_of_2024_have_a_zone_and_come_in_any_order(tmp_path):
    text = (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2024-05-10 00:00:01.009930+00:00,20,3\n"
        "\n"
        "2024-05-10 00:00:00.009930+00:00,10,0\n"
    )
    found = read_trace(write(tmp_path, text))
    assert [(one.arrival, one.prompt, one.output) for one in found] == [(0, 10, 1), (1, 20, 3)]


def test_mooncakes_blocks_are_shared_as_far_as_all_before_them_are(tmp_path):
    found = read_trace(write(tmp_path, lines(MOONCAKE)))
    assert [one.arrival for one in found] == [0, 0.277, 0.471]
    assert [one.output for one in found] == [9, 1, 5]
    ends = [[end for end, _ in one.shared] for one in found]
    assert ends == [[512, 1024, 1100], [512, 1024, 1500], [512, 600]]
    first, second, third = ([name for _, name in one.shared] for one in found)
    assert first[:2] == second[:2]
    assert first[2] != second[2]
    assert not set(third) & set(first), "block 1 after another block is not the same prefix"


def test_only_the_first_requests_are_read(tmp_path):
    assert len(read_trace(write(tmp_path, AZURE + "nonsense\n"), 3)) == 3
    assert len(read_trace(write(tmp_path, lines(MOONCAKE)), 2)) == 2


HEADER = AZURE.splitlines()[0]
ROW = "2023-11-16 18:15:46,374,44"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "is empty"),
        (f"{HEADER}\n", "has no requests"),
        ("time,in,out\n1,2,3\n", "line 1 of .* is not the header of Azure's traces"),
        (f"{HEADER}\n{ROW}\n{ROW},9\n", "line 3 of .* has 4 columns, not the 3 of the header"),
        (f"{HEADER}\n\nsoon,1,2\n", "line 3 of .* has 'soon' for TIMESTAMP, not a date and time"),
        (f"{HEADER}\n2023-11-16,x,2\n", 'line 2 of .* has "x" for ContextTokens, not a whole'),
        (f"{HEADER}\n2023-11-16,0,2\n", "line 2 of .* has 0 for ContextTokens, which must be 1"),
        (f"{HEADER}\n2023-11-16,5,-2\n", "line 2 of .* has -2 for GeneratedTokens, which must"),
        (f"{HEADER}\n2023-11-16,größe,2\n", 'line 2 of .* has "größe" for ContextTokens'),
        (
            f"{HEADER}\n2023-11-16,{'9' * 400},2\n",
            "line 2 of .* which must be 1,000,000,000,000 or",
        ),
        (f"{HEADER}\n2023-11-16,{'9' * 5000},2\n", "line 2 of .* for ContextTokens, not a whole"),
        ("{\n", "line 1 of .* is not JSON"),
        (lines(MOONCAKE[:1]) + "[" * 10**5, "line 2 of .* is not JSON .maximum recursion"),
        (lines(MOONCAKE[:1]) + "9" * 5000, "line 2 of .* is not JSON .Exceeds the limit"),
        (lines([*MOONCAKE, {"timestamp": 1}]), "line 4 of .* has no input_length"),
        (lines([{**MOONCAKE[0], "timestamp": "1"}]), 'line 1 of .* has "1" for timestamp'),
        (
            lines([{**MOONCAKE[0], "timestamp": -1}]),
            "line 1 of .* has -1 for timestamp, which must",
        ),
        (lines([{**MOONCAKE[0], "timestamp": math.nan}]), "line 1 of .* has NaN for timestamp"),
        (
            lines([{**MOONCAKE[0], "timestamp": math.inf}]),
            "line 1 of .* has Infinity for timestamp",
        ),
        (lines([{**MOONCAKE[0], "timestamp": 10**400}]), "line 1 of .* for timestamp, which must"),
        (lines([{**MOONCAKE[0], "input_length": 1.5}]), "has 1.5 for input_length, not a whole"),
        (lines([{**MOONCAKE[0], "hash_ids": [1]}]), "has 1 for hash_ids, and a prompt of 1,100"),
        (lines([{**MOONCAKE[0], "hash_ids": 7}]), "has no list for hash_ids"),
        (lines([{**MOONCAKE[0], "hash_ids": [1, "x", 2]}]), 'has "x" for an entry of hash_ids'),
    ],
)
def test_a_wrong_line_is_named(tmp_path, text, sentence):
    with pytest.raises(ValueError, match=sentence):
        read_trace(write(tmp_path, text))


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere\.csv cannot be read: No such file"):
        read_trace(tmp_path / "nowhere.csv")


def test_a_synthetic_trace_is_the_same_each_time_and_what_was_asked_for():
    asked = parse_synthetic("requests=400 prompt=6000, output=256 rate=2 shared=1024 families=3")
    assert asked == Synthetic(
        requests=400, prompt=6000, output=256, rate=2, shared=1024, families=3
    )
    found = make_synthetic(asked)
    assert found == make_synthetic(asked) != make_synthetic(parse_synthetic("requests=400 seed=1"))
    assert len(found) == 400
    assert 5500 < sum(one.prompt for one in found) / 400 < 6500
    assert {one.shared[0] for one in found} == {(1024, family) for family in range(3)}
    assert 150 < found[-1].arrival < 250


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("speed=3", "--synthetic has 'speed=3': it takes requests, prompt"),
        ("prompt=long", "--synthetic has 'long' for prompt, not a whole number"),
        ("rate=fast", "--synthetic has 'fast' for rate, not a number"),
        ("rate=nan", "--synthetic has nan for rate, which must be"),
        ("rate=inf", "--synthetic has inf for rate, which must be"),
        (f"prompt={'9' * 400}", "--synthetic has 9+ for prompt, which must be"),
        ("'prompt=9", "--synthetic has ''prompt=9': it takes requests, prompt"),
        ("requests=0", "--synthetic has 0 requests: give 1 or more"),
        ("rate=-1", "--synthetic has a rate or shared tokens below 0"),
        ("spread=1", "--synthetic has a spread of 1.0, not from 0 to below 1"),
    ],
)
def test_wrong_numbers_are_refused(text, sentence):
    with pytest.raises(ValueError, match=sentence):
        parse_synthetic(text)


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 3)), max_size=4),
    st.integers(1, 40),
    st.integers(0, 9),
    st.integers(1, 9),
)
def test_pages_have_equal_names_where_all_before_them_is_shared(parts, own, cut, page):
    """Two requests that share some parts and no more."""
    ends, shared = 0, []
    for place, (length, block) in enumerate(parts):
        ends += length
        shared.append((ends, 10 * place + block))
    common = shared[: min(cut, len(shared))]
    first = Request(0, ends + own, 5, tuple(shared))
    second = Request(0, ends + own, 5, tuple(common))
    ours, theirs = page_names(first, 0, page), page_names(second, 1, page)
    assert len(ours) == len(theirs) == (ends + own + 5) // page
    assert len(set(ours)) == len(ours)
    alike = common[-1][0] // page if common else 0
    assert [a == b for a, b in zip(ours, theirs, strict=True)] == [
        place < alike for place in range(len(ours))
    ]
