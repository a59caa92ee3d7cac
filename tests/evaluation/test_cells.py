# SPDX-License-Identifier: Apache-2.0
"""Cells run in processes of their own, once."""

import sys

import pytest

from entropykv_vllm.evaluation import cells

CELL = """
from pathlib import Path
from entropykv_vllm.evaluation import cells
def measure(spec):
    if spec["fail"]: raise ValueError("out of luck")
    print("a line for the log")
    cells.report(1, 2)
    with open(spec["runs"], "a") as runs: runs.write("x")
    return {"value": 7}
if __name__ == "__main__": cells.main(measure)
"""


@pytest.fixture
def spec(tmp_path, monkeypatch):
    (tmp_path / "toy_cell.py").write_text(CELL)
    monkeypatch.setenv("PYTHONPATH", ":".join([str(tmp_path), *filter(None, sys.path)]))
    return {"policy": "none", "fail": False, "runs": str(tmp_path / "runs")}


def test_a_cell_runs_once_and_again_if_its_specification_changes(tmp_path, spec):
    steps = []
    result = tmp_path / "out" / "cell.json"
    first = cells.run("toy_cell", spec, result, lambda *step: steps.append(step))
    assert first["value"] == 7
    assert steps == [(1, 2)]
    assert "a line for the log" in result.with_suffix(".log").read_text()
    assert cells.run("toy_cell", spec, result) == first
    cells.run("toy_cell", {**spec, "seed": 1}, result)
    assert (tmp_path / "runs").read_text() == "xx"


def test_a_failed_cell_shows_its_log_and_leaves_no_result(tmp_path, spec):
    with pytest.raises(RuntimeError, match="out of luck"):
        cells.run("toy_cell", {**spec, "fail": True}, tmp_path / "cell.json")
    assert not (tmp_path / "cell.json").exists()


def test_stock_vllm_runs_without_plugins():
    assert cells.environment("none")["VLLM_PLUGINS"] == ""
    assert int(cells.environment("norm")["OMP_NUM_THREADS"]) > 0
