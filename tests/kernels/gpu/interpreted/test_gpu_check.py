# SPDX-License-Identifier: Apache-2.0
"""`make gpu-check` on a CPU, with few and small cases: each check runs, and can fail."""

import json

import torch

from entropykv_vllm.evaluation.gpu_check import checks, command, kernels


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
