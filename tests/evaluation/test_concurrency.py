# SPDX-License-Identifier: Apache-2.0
"""The concurrency benchmark: its order, its counts, its table."""

import pytest

from entropykv_vllm.evaluation import concurrency, concurrency_cell
from entropykv_vllm.evaluation.drive import Sample

SAMPLES = [
    Sample(seconds=2.0, running=2, waiting=3, answering=0, used=0.5),
    Sample(seconds=3.0, running=4, waiting=1, answering=2, used=1.0),
    Sample(seconds=5.0, running=1, waiting=0, answering=1, used=0.0),
]


def test_turns_alternate_and_change_sides():
    assert concurrency.turns("norm", 2) == [("none", 0), ("norm", 0), ("norm", 1), ("none", 1)]


def test_waiting_is_counted_step_by_step():
    assert concurrency_cell.waited(SAMPLES) == pytest.approx(2.0 * 3 + 1.0 * 1 + 2.0 * 0)


def test_counts_of_a_run():
    counts = concurrency_cell.counts(SAMPLES, requests=4, output=10)
    assert counts["seconds"] == 5.0
    assert counts["output tokens/s"] == pytest.approx(8)
    assert counts["running at most"] == 4
    assert counts["answering at most"] == 2
    assert counts["mean wait in s"] == pytest.approx(7 / 4)


def test_the_table_has_medians_and_ratios():
    def result(policy: str, seconds: float) -> dict:
        return {
            "spec": {"policy": policy},
            **dict.fromkeys(concurrency.ROWS, 0),
            "seconds": seconds,
        }

    runs = [result("none", 10), result("none", 30), result("norm", 4), result("norm", 6)]
    rows = concurrency.rows(runs, "norm")
    assert rows[0] == ["seconds", "20.0", "5.0", "0.25"]
    assert rows[-1][-1] == "–"  # nothing to divide by
