# SPDX-License-Identifier: Apache-2.0
"""`make gpu-check` on a CPU, with few and small cases: each check runs, and can fail."""

import json

import pytest
import torch

from entropykv_vllm.evaluation.gpu_check import checks, clock, command, kernels, speed


def test_all_of_it_runs(tmp_path, capsys):
    out = tmp_path / "report.json"
    assert command.main(["--device", "cpu", "--small", "--out", str(out)]) == 0
    report = json.loads(out.read_text())
    assert len(report["checks"]) > 20
    assert all(check["right"] for check in report["checks"])
    (row,) = report["decode"]
    assert set(row["baseline"]) >= {"sdpa", "sdpa, grouped"}
    assert {"16 bits", "8 bits", "4 bits"} <= set(row)
    assert "decode" in capsys.readouterr().out


def test_a_wrong_kernel_is_found(monkeypatch):
    right = kernels.found("cpu")["triton"]

    def shifted(caches, src, dst, *rest):
        right.collapse(caches, src, dst, *rest)
        caches[0].view(torch.uint8)[dst[0, 0], 0, 0, 0] += 1

    wrong = kernels.Kernels(right.write, shifted, right.drop)
    found = {
        name: run() > limit
        for name, run, limit in checks.all_checks("cpu", {"triton": wrong}, checks.FEW)
        if "4 bits, collapse by given scores" in name
    }
    assert found
    assert all(found.values())


def test_the_check_of_a_graph_compares_what_it_should():
    """On a CPU the call is made anew, so it is right; what was captured is another batch."""
    (shape,) = checks.FEW.shapes
    assert checks._replay(shape, "cpu") <= checks.LOOSE


def test_a_stale_graph_is_found(monkeypatch):
    (shape,) = checks.FEW.shapes

    def graphed(call, device):
        call()
        return lambda: None

    monkeypatch.setattr(checks, "graphed", graphed)
    assert checks._replay(shape, "cpu") > checks.LOOSE


def test_seconds_are_the_median_of_calls_after_the_first_ones(monkeypatch):
    spent = iter([9.0, 9.0, 0.04, 0.05, 0.01, 0.03, 0.02, 0.06])
    calls = []
    monkeypatch.setattr(clock, "_on_gpu", lambda call: (call(), next(spent))[1])
    assert clock.seconds(lambda: calls.append(1), "cuda", budget=0.1, least=5) == 0.03
    assert len(calls) == 8


def refuse(*arguments):
    raise NotImplementedError("no such kernel\nfor this card")


def no_room(*arguments):
    raise torch.cuda.OutOfMemoryError("out of memory")


@pytest.mark.parametrize("queries", [1, 9])
def test_a_baseline_that_does_not_run_is_told_from_one_without_memory(monkeypatch, queries):
    (shape,) = checks.FEW.shapes
    monkeypatch.setattr(speed, "_libraries", lambda *arguments: {})
    for name in ("_torch_decode", "_torch_prefill"):
        monkeypatch.setattr(speed, name, lambda *arguments: {"sdpa": refuse})

    def measured():
        if queries == 1:
            row = speed.decode(shape, 1, 288, "cpu", 1e9)
            return row, command.decode_table([row])
        row = speed.prefill(shape, 288, queries, "cpu")
        return row, command.prefill_table([row])

    row, table = measured()
    assert row["baseline"] == {}
    assert row["baseline failed"] == {"sdpa": "no such kernel"}
    assert "none ran" in table
    assert "no memory" not in table

    monkeypatch.setattr(speed, "_dense", no_room)
    row, table = measured()
    assert row["baseline"] is None
    assert "baseline failed" not in row
    assert table.count("no memory") == 1

    monkeypatch.setattr(speed, "full_requests", no_room)
    row, table = measured()
    assert not [name for name in row if name.endswith(" bits")]
    assert table.count("no memory") == 4


def test_checks_are_kept_if_the_measurements_break_off(monkeypatch, tmp_path):
    monkeypatch.setattr(command, "check", lambda *arguments: [{"check": "one", "right": False}])
    monkeypatch.setattr(command, "measure", refuse)
    out = tmp_path / "new" / "report.json"
    with pytest.raises(NotImplementedError):
        command.main(["--device", "cpu", "--small", "--out", str(out)])
    assert json.loads(out.read_text())["checks"] == [{"check": "one", "right": False}]
