# SPDX-License-Identifier: Apache-2.0
"""Tables, and the rows of the needle table."""

from entropykv_vllm.evaluation import table
from entropykv_vllm.evaluation.needle import command as needle
from entropykv_vllm.evaluation.needle import plot


def test_a_table_is_aligned_markdown():
    assert table.render(["policy", "n"], [["a", "10"], ["window", "5"]]).splitlines() == [
        "| policy |  n |",
        "| ------ | -: |",
        "| a      | 10 |",
        "| window |  5 |",
    ]


def test_the_rows_of_a_table_can_be_read_again():
    rows = [["", "10"], ["-", "–"]]
    text = table.render(["policy", "n"], rows)
    wanted = [{"policy": "", "n": "10"}, {"policy": "-", "n": "–"}]
    assert table.records(f"before\n\n{text}\n\n{text}\nafter") == 2 * wanted


def test_intervals_are_whole_percentages():
    assert table.interval([0.5, 0.364, 0.636]) == "50 (36-64)"


def result(policy: str, keep: float) -> dict:
    share = [0.9, 0.8, 0.95]
    return {
        "spec": {"policy": policy, "keep": keep, "tokens": 2048},
        "held": 0.561,
        "peak": 0.7,
        "exact": share,
        "digits": share,
        "form": share,
        "answers": [
            {"number": "1234567", "answer": answer}
            for answer in (" 1234567.", " 1591, and", " 1234567")
        ],
    }


def test_rows_name_the_full_cache():
    rows = needle.rows([result("none", 1.0), result("norm", 0.5)], [True, False, False])
    assert rows[0][:4] == ["full cache", "1", "56", "70"]
    assert rows[1] == ["norm", "0.5", "56", "70"] + ["90 (80-95)"] * 3 + ["1/2", "1/1"]
    assert len(needle.HEADER) == len(rows[0])


def test_the_picture_is_drawn_where_matplotlib_is(tmp_path):
    drawn = plot.draw([result("none", 1.0), result("norm", 0.5)], tmp_path / "a.png")
    assert drawn == (tmp_path / "a.png").exists()
