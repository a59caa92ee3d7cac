# SPDX-License-Identifier: Apache-2.0
"""An interrupted run goes on, and one of other settings does not."""

import pytest

from entropykv_vllm.evaluation.offline.runs import resumed


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
