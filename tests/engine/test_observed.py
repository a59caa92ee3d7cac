# SPDX-License-Identifier: Apache-2.0
"""Scores that read attention, through the engine."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.engine

#: Of 60 tokens, before any boundary: the queries that count.
COUNTED = {"h2o": 60, "snapkv": 0}


@pytest.mark.parametrize("policy", COUNTED)
def test_masses_are_those_of_the_queries_and_answers_depend_on_prompts_alone(policy, tmp_path):
    script = Path(__file__).with_name("run_observed.py")
    subprocess.run([sys.executable, str(script), policy, str(tmp_path)], check=True, timeout=300)
    once, chunks = json.loads((tmp_path / "report.json").read_text()).values()
    for run in (once, chunks):
        assert [head for layer in run["masses"] for head in layer] == pytest.approx(
            [COUNTED[policy]] * 4, abs=1e-3
        )
        assert run["together"] == run["alone"]
    assert once["together"] == chunks["together"]
