# SPDX-License-Identifier: Apache-2.0
"""What a cell holds is counted alike wherever it is told."""

from entropykv_vllm.evaluation.calibration import probes
from entropykv_vllm.evaluation.calibration import run as calibration
from entropykv_vllm.evaluation.offline import answers
from entropykv_vllm.evaluation.offline.cell import Cell
from entropykv_vllm.evaluation.tasks import Case

SHORT = {"keep": 0.5, "bits": 16, "window": 32, "interval": 64, "segment": 64}
CELLS = [Cell("whole", "none"), Cell("half", "entropykv", SHORT)]


def test_calibrate_tune_and_eval_say_the_same_is_held(model, prompt, tmp_path, monkeypatch):
    case = Case(prompt(250), prompt(5), prompt(3), ("7",), 0.5)
    monkeypatch.setattr(probes, "make", lambda *_: [probes.Probe(case, [7])])
    texts = calibration.Texts(tokens=255, count=1)
    file = tmp_path / "cells.jsonl"
    arguments = model, model.folder, [[2, 3]], texts, CELLS, file
    found = calibration.run(*arguments, lambda done, total: None)
    evaluated = answers.answer(model, CELLS, [case], 2)
    assert [one.held for one in found] == [one.held for one in evaluated]
    assert found[0].held == 9 * 32 / 258  # whole pages: more than 1
