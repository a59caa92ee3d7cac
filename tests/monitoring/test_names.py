# SPDX-License-Identifier: Apache-2.0
"""The dashboard and the alerts ask for metrics that a server exports, and the page names them."""

import re
import urllib.request

import pytest

from . import queries
from .conftest import ROOT

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def exported(exporter) -> set[str]:
    """The names of all samples."""
    with urllib.request.urlopen(f"http://127.0.0.1:{exporter.port}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    return {line.split("{")[0].split(" ")[0] for line in text.splitlines() if line[:1] != "#"}


def test_a_server_exports_every_metric_that_is_asked_for(exported):
    assert queries.names() <= exported


def test_every_metric_of_ours_is_on_the_dashboard(exported):
    ours = {name for name in exported if "entropykv" in name and not name.endswith("_created")}
    shown = {name for some in queries.panels().values() for query in some for name in query.split()}
    assert ours
    assert not [name for name in ours if not any(name in query for query in shown)]


def test_the_page_has_our_metrics_and_the_alerts(exported):
    page = (ROOT / "docs/metrics.md").read_text()
    ours = {name for name in exported if "entropykv" in name and not name.endswith("_created")}
    assert ours == set(re.findall(r"^\| `(vllm:entropykv_\w+)", page, re.MULTILINE))
    assert set(queries.rules()) == set(re.findall(r"^\| `([A-Z]\w+)` \|", page, re.MULTILINE))
