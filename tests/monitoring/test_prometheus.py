# SPDX-License-Identifier: Apache-2.0
"""A real Prometheus scrapes a server of metrics, and answers what the dashboard asks."""

import json
import math
import os
import re
import signal
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from entropykv_vllm.evaluation.server import free_port

from . import queries
from .conftest import CONFIG, RULES, program

pytestmark = pytest.mark.slow

#: Seconds; a busy machine starts programs slowly.
PATIENCE = 120


class Api:
    """Prometheus over HTTP."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}/api/v1"

    def get(self, path: str, **parameters: str) -> Any:
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"{self.url}/{path}?{query}", timeout=30) as answer:
            found = json.load(answer)
        assert found["status"] == "success", found
        return found["data"]

    def values(self, query: str) -> list[float]:
        """The numbers of a query, NaN left out: a quotient of counters that stand still."""
        found = [float(x["value"][1]) for x in self.get("query", query=query)["result"]]
        return [value for value in found if not math.isnan(value)]


def wait(asked: Callable[[], Any], what: str) -> Any:
    """Ask until the answer is true."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        try:
            if answer := asked():
                return answer
        except OSError:
            pass  # not up yet
        time.sleep(0.5)
    raise AssertionError(f"{what}: not within {PATIENCE} seconds")


def configuration(folder: Path, port: int) -> Path:
    """The one that we ship, in less time and with the server's port."""
    (folder / RULES.name).write_text(RULES.read_text())
    text, ports = re.subn(r'(targets: \["127\.0\.0\.1:)\d+', rf"\g<1>{port}", CONFIG.read_text())
    text, intervals = re.subn(r"interval: \d+s", "interval: 1s", text)
    assert (ports, intervals) == (1, 2)
    (folder / CONFIG.name).write_text(text)
    return folder / CONFIG.name


@pytest.fixture(scope="module")
def prometheus(exporter, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    folder, port = tmp_path_factory.mktemp("prometheus"), free_port()
    command = [
        program("prometheus"),
        f"--config.file={configuration(folder, exporter.port)}",
        f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    log = folder / "log"
    with log.open("w") as sink, subprocess.Popen(command, stderr=sink) as child:
        try:
            yield Api(port)
        finally:
            child.terminate()


def test_the_server_is_scraped(prometheus):
    assert wait(lambda: prometheus.values('up{job="entropykv"}') == [1.0], "up")


def test_the_rules_are_evaluated(prometheus):
    def healthy() -> bool:
        (group,) = prometheus.get("rules")["groups"]
        rules = {rule["name"]: rule for rule in group["rules"]}
        assert set(rules) == set(queries.rules())
        assert not [rule for rule in rules.values() if rule["health"] == "err"], rules
        return all(rule["health"] == "ok" for rule in rules.values())

    assert wait(healthy, "rules")
    assert prometheus.get("alerts")["alerts"] == []


@pytest.mark.parametrize("title", queries.panels())
def test_a_panel_has_data(prometheus, title):
    for query in queries.panels()[title]:
        assert wait(lambda query=query: prometheus.values(query), query)


def test_panels_show_what_the_server_counted(prometheus):
    panels = queries.panels()
    (hit_rate,) = panels["Prefix hit rate"]
    assert wait(lambda: prometheus.values(hit_rate), "hits") == [pytest.approx(0.4)]
    assert sorted(prometheus.values(panels["Pages held"][0])) == [4.0, 9.0]
    assert [prometheus.values(query) for query in panels["Requests"]] == [[3.0], [2.0]]


def test_a_variable_of_the_dashboard_has_values(prometheus):
    (model,) = [v for v in queries.dashboard()["templating"]["list"] if v["name"] == "model"]
    metric, label = re.fullmatch(r"label_values\((.*), (\w+)\)", model["definition"]).groups()
    assert wait(lambda: prometheus.get(f"label/{label}/values", **{"match[]": metric}), "model")


def test_a_server_that_stops_is_noticed(prometheus, exporter):
    """The last test: the exporter answers no more until it is let go on."""
    os.kill(exporter.pid, signal.SIGSTOP)
    try:

        def pending() -> bool:
            alerts = prometheus.get("alerts")["alerts"]
            return [a["labels"]["alertname"] for a in alerts] == ["ServerDown"]

        assert wait(pending, "ServerDown")
    finally:
        os.kill(exporter.pid, signal.SIGCONT)
