# SPDX-License-Identifier: Apache-2.0
"""An interrupted run goes on, and one of other settings does not."""

import pytest

from entropykv_vllm.errors import RunError
from entropykv_vllm.evaluation.offline.runs import resumed, stored


def squares(start):
    n = start
    while True:
        yield n * n
        n += 1


def test_only_what_is_missing_is_produced(tmp_path):
    file, asked = tmp_path / "a" / "x.jsonl", []

    def produce(start):
        asked.append(start)
        return squares(start)

    assert resumed(file, {"a": 1}, 3, produce) == [0, 1, 4]
    assert resumed(file, {"a": 1}, 5, produce) == [0, 1, 4, 9, 16]
    assert resumed(file, {"a": 1}, 2, produce) == [0, 1]
    assert asked == [0, 3]


def test_a_torn_line_is_done_again(tmp_path):
    file = tmp_path / "x.jsonl"
    resumed(file, {}, 3, squares)
    file.write_text(file.read_text() + "12")
    assert resumed(file, {}, 4, squares) == [0, 1, 4, 9]
    assert resumed(file, {}, 4, pytest.fail) == [0, 1, 4, 9]


def test_another_specification_begins_anew(tmp_path):
    file = tmp_path / "x.jsonl"
    resumed(file, {"a": 1}, 3, lambda start: iter([7, 7, 7]))
    assert resumed(file, {"a": 2}, 3, squares) == [0, 1, 4]


def test_what_was_done_before_a_failure_is_kept(tmp_path):
    file = tmp_path / "x.jsonl"

    def failing(start):
        yield from [0, 1]
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError):
        resumed(file, {}, 4, failing)
    assert resumed(file, {}, 4, squares) == [0, 1, 4, 9]


def test_what_is_of_another_specification_is_set_aside_and_never_lost(tmp_path, capsys):
    file = tmp_path / "x.jsonl"
    for n in range(3):
        resumed(file, {"a": n}, 1, lambda start, n=n: iter([n]))
    assert (
        "x.jsonl was of another specification, and is x.jsonl.old2 now" in capsys.readouterr().err
    )
    assert stored(tmp_path / "x.jsonl.old", {"a": 0}) == [0]
    assert stored(tmp_path / "x.jsonl.old2", {"a": 1}) == [1]
    assert stored(file, {"a": 2}) == [2]


def test_a_blank_last_line_is_no_result(tmp_path):
    file = tmp_path / "x.jsonl"
    resumed(file, {}, 2, squares)
    file.write_text(file.read_text() + "\n\n")
    assert resumed(file, {}, 3, squares) == [0, 1, 4]


def test_a_torn_line_in_the_middle_is_named(tmp_path):
    file = tmp_path / "x.jsonl"
    file.write_text('{}\n0\n{"an\n4\n')
    with pytest.raises(RunError, match=r"x.jsonl, line 3, is no JSON"):
        resumed(file, {}, 4, squares)


def test_a_torn_specification_is_another_one(tmp_path):
    file = tmp_path / "x.jsonl"
    file.write_text('{"a": \n0\n')
    assert resumed(file, {"a": 1}, 1, squares) == [0]
    assert (tmp_path / "x.jsonl.old").read_text() == '{"a": \n0\n'
