# SPDX-License-Identifier: Apache-2.0
"""Real programs: Prometheus, and a server of metrics for it to scrape."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from entropykv_vllm.evaluation.server import environment

ROOT = Path(__file__).parents[2]
RULES = ROOT / "configs/prometheus/alerts.yml"
CONFIG = ROOT / "configs/prometheus/prometheus.yml"
DASHBOARD = ROOT / "configs/grafana/entropykv.json"


def program(name: str) -> str:
    """Where it is; the test is skipped where it is not."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"NOT CHECKED: there is no {name} (on Debian: apt install prometheus)")
    return found


@pytest.fixture(scope="session")
def promtool() -> str:
    return program("promtool")


@pytest.fixture(scope="package")
def exporter() -> Iterator[subprocess.Popen]:
    """A process that serves metrics at `port`, an attribute of it."""
    command = [sys.executable, "-m", "tests.monitoring.exporter"]
    with subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE) as child:
        try:
            child.port = int(child.stdout.readline())
            yield child
        finally:
            child.kill()
