# SPDX-License-Identifier: Apache-2.0
"""vLLM's V2 model runner and its scheduler that plans ahead, in engines on a CPU.

A small model with random weights answers three prompts: together, in chunks; again, from the prefix
cache; and with too few pages, so that requests are preempted. The answers are those of the V1
runner, which everything else here runs on.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .run_runner import prompts

pytestmark = pytest.mark.engine

SETTINGS = {
    # Each segment leaves a page, and two of those become one.
    "16 bits": {"bits": 16, "keep": 0.125, "window": 64, "segment": 128, "interval": 128},
    "4 bits": {"bits": 4, "keep": 0.5, "window": 32, "interval": 96},
}
ROUNDS = ["together", "again", "tight"]
#: Of an answer; and of one that is interpreted.
TOKENS, FEW = 40, 6


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Run engines in a process of their own: for each its report, by name."""

    def run(v2: bool, engines: dict[str, dict], as_gpus: bool = False) -> dict[str, dict]:
        folder = tmp_path_factory.mktemp("runner")
        job = {
            "v2": v2,
            "as_gpus": as_gpus,
            "rounds": ROUNDS[:2] if as_gpus else ROUNDS,
            "tokens": FEW if as_gpus else TOKENS,
            "engines": list(engines.values()),
        }
        (folder / "job.json").write_text(json.dumps(job))
        command = [sys.executable, "-m", "tests.engine.run_runner"]
        files = [str(folder / name) for name in ("job.json", "report.json")]
        root = Path(__file__).parents[2]
        subprocess.run([*command, *files], check=True, timeout=500, cwd=root, env=os.environ)
        return dict(zip(engines, json.loads((folder / "report.json").read_text()), strict=True))

    return run


def engine(name: str | None, ahead: bool = False) -> dict:
    return {"ahead": ahead, "settings": SETTINGS[name] if name else None}


@pytest.fixture(scope="module")
def v1(run):
    """What the V1 runner answers, with each of the settings and without the plugin."""
    reports = run(False, {name: engine(name) for name in (*SETTINGS, None)})
    plain = reports[None]["answers"]["together"]
    for name in SETTINGS:
        found = reports[name]["answers"]["together"]
        assert found != plain, "eviction changed no token"
        assert found[2] == plain[2], "the last prompt ends before anything is evicted"
    return reports


def check(report: dict, expected: dict, tokens: int = TOKENS) -> None:
    assert report["free"], "pages leaked"
    assert report["seen"]["collapse"] > 1
    assert report["seen"]["merge"] > 0
    assert report["seen"]["moved in flight"] == 0
    assert report["hits"] == expected["hits"] == [len(ids) // 32 * 32 for ids in prompts()]
    for when, answers in report["answers"].items():
        first = [answer[:tokens] for answer in expected["answers"]["together"]]
        assert answers == first, when


def test_the_v2_runner_answers_as_the_v1_runner_does(run, v1):
    ways = {"in turn": engine("16 bits"), "ahead": engine("16 bits", ahead=True)}
    reports = run(True, ways)
    for report in (v1["16 bits"], *reports.values()):
        check(report, v1["16 bits"])
        assert report["seen"]["preempted"] > 0
    assert all(report["runner"].startswith("vllm.v1.worker.cpu.") for report in reports.values())
    in_turn, ahead = reports.values()
    assert (in_turn["scheduler"], in_turn["seen"]["waited"]) == ("EvictionScheduler", 0)
    assert ahead["scheduler"] == "EvictionAsyncScheduler"
    assert ahead["seen"]["waited"] > 0, "no request waited at a boundary for a step in flight"


def test_the_backend_of_gpus_answers_as_that_of_cpus_does(run, v1):
    """With 16 bits vLLM's Triton kernel reads our tables, and with fewer ours does."""
    reports = run(True, {name: engine(name, ahead=True) for name in SETTINGS}, as_gpus=True)
    for name, report in reports.items():
        check(report, v1[name], FEW)
