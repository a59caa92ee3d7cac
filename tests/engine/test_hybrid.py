# SPDX-License-Identifier: Apache-2.0
"""Models in which only some layers have full attention: the others stay vLLM's."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.engine


def test_sliding_window_layers_are_left_to_vllm(tmp_path):
    script = Path(__file__).with_name("run_hybrid.py")
    subprocess.run([sys.executable, str(script), str(tmp_path)], check=True, timeout=300)
    report = json.loads((tmp_path / "report.json").read_text())
    ours = [names for spec, names in report["groups"] if spec == "TierSpec"]
    theirs = [names for spec, names in report["groups"] if spec == "SlidingWindowSpec"]
    assert [name.split(".")[2] for names in ours for name in names] == ["2", "5"]
    assert sum(map(len, theirs)) == 4
    assert report["hits"] == [1472, 672, 32]
    assert report["first"] == report["again"] == report["alone"]
