# SPDX-License-Identifier: Apache-2.0
"""Models in which only some layers have full attention: the others stay vLLM's."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from entropykv_vllm.config.settings import load
from entropykv_vllm.plan.model_shape import read_shape
from entropykv_vllm.plan.pool import STEPS_IN_FLIGHT, eviction_pool
from entropykv_vllm.serving.settings import page_size

from .run_hybrid import GEMMA, MAX_LEN, POOL, SETTINGS

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hybrid")
    script = Path(__file__).with_name("run_hybrid.py")
    subprocess.run([sys.executable, str(script), str(folder)], check=True, timeout=300)
    return json.loads((folder / "report.json").read_text())


@pytest.fixture(scope="module")
def report(reports):
    return reports["whole"]


def test_sliding_window_layers_are_left_to_vllm(report):
    ours = [names for spec, names in report["groups"] if spec == "TierSpec"]
    theirs = [names for spec, names in report["groups"] if spec == "SlidingWindowSpec"]
    assert [name.split(".")[2] for names in ours for name in names] == ["2", "5"]
    assert sum(map(len, theirs)) == 4
    assert report["hits"] == [1472, 672, 32]
    assert report["first"] == report["again"] == report["alone"]


def test_the_planner_counts_the_pages_and_requests_of_this_pool(report):
    settings = load("entropykv", SETTINGS)
    step = report["in_flight"] // STEPS_IN_FLIGHT
    pool = eviction_pool(read_shape(GEMMA), settings, page_size(settings), 4, step)
    assert pool.usable(POOL) + 1 == report["pages"]
    assert report["pages"] / report["concurrency"] == pytest.approx(pool.peak(MAX_LEN))


def test_pages_that_held_codes_are_cleared_for_sliding_windows(reports):
    """Read as floats, codes may be NaN, which vLLM's kernels do not leave out."""
    assert reports["quantized"]["later"] == reports["quantized"]["first"]
