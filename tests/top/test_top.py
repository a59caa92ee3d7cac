# SPDX-License-Identifier: Apache-2.0
"""`entropykv top`, against what a server's /metrics said while it read prompts, and 12 s later."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from entropykv_vllm import cli
from entropykv_vllm.serving import metrics
from entropykv_vllm.top import look as looking
from entropykv_vllm.top import report as reporting
from entropykv_vllm.top.look import Look
from entropykv_vllm.top.report import EVICTED, FREED, report, text

from ..serving.sources import RELEASES, sources

HERE = Path(__file__).parent
URL = "http://127.0.0.1:8000"
BEFORE, AFTER = ((HERE / f"{name}.txt").read_text() for name in ("before", "after"))


class Server(HTTPServer):
    """Gives the texts one after the other, and then the last one for ever."""

    texts: tuple[str, ...]
    asked = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        if self.path != "/metrics":
            self.send_error(404)
            return
        texts = self.server.texts
        answer = texts[min(self.server.asked, len(texts) - 1)].encode()
        self.server.asked += 1
        self.send_response(200)
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        """Say nothing on standard error."""


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server(("127.0.0.1", 0), Handler)
    made.texts = (BEFORE, AFTER)
    thread = threading.Thread(target=made.serve_forever)
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


def looks(*texts: str) -> list[Look]:
    """Looks at texts, two seconds apart."""
    found = [looking.read(text, URL) for text in texts]
    for i, one in enumerate(found):
        one.at = 2.0 * i
    return found


def without(text: str, name: str) -> str:
    return "".join(line for line in text.splitlines(keepends=True) if name not in line)


def test_what_happened_between_two_looks() -> None:
    before, now = looks(BEFORE, AFTER)
    found = report(now, before, URL)
    (tier,) = found.pop("tiers")
    assert found == {
        "url": URL,
        "models": ["smollm2"],
        "seconds": 2.0,
        "evicts": True,
        "running": 4,
        "waiting": 0,
        "preemptions": 0,
        "tokens_in_per_second": 13755 / 2,
        "tokens_out_per_second": 31,
        "time_to_first_token_seconds": pytest.approx(486.85386896 / 4),
        "inter_token_seconds": pytest.approx(20.79152023 / 58),
        "pool_usage": pytest.approx(0.06735395),
        "prefix_hit_rate": pytest.approx(416 / 13755),
        "pages_freed_per_second": 18,
        "tokens_evicted_per_second": 336,
    }
    assert tier == {
        "tier": "all",
        "hot_pages": 42,
        "cold_pages": 56,
        "pages_freed_per_second": 18,
        "tokens_evicted_per_second": 336,
    }


def test_tiers_and_engines_are_told_apart_and_added_up() -> None:
    lines = [line for line in AFTER.splitlines() if line.startswith("vllm:")]
    other = [line.replace('engine="0"', 'engine="1"') for line in lines]
    other = [line.replace('tier="all"', 'tier="deep"') for line in other]
    before, now = looks(BEFORE, "\n".join([*lines, *other]) + "\n")
    found = report(now, before, URL)
    assert [tier["tier"] for tier in found["tiers"]] == ["all", "deep"]
    assert found["running"] == 8
    assert found["pool_usage"] == pytest.approx(0.06735395)
    deep = found["tiers"][1]
    assert (deep["hot_pages"], deep["pages_freed_per_second"]) == (42, 336 / 2)
    assert found["pages_freed_per_second"] == (2 * 336 - 300) / 2


def test_a_first_look_knows_no_rates() -> None:
    (now,) = looks(AFTER)
    found = report(now, None, URL)
    assert found["tokens_out_per_second"] is found["tiers"][0]["pages_freed_per_second"] is None
    assert found["running"] == 4
    assert re.search("^tokens out/s +–$", text(found), re.MULTILINE)


def test_a_server_that_was_started_anew_is_a_first_look() -> None:
    before, now = looks(AFTER, BEFORE)
    assert report(now, before, URL)["seconds"] is None


def test_a_server_without_eviction_is_told_so() -> None:
    before, now = looks(*(without(t, "entropykv") for t in (BEFORE, AFTER)))
    found = report(now, before, URL)
    assert (found["evicts"], found["tiers"]) == (False, [])
    assert "runs without eviction: serve with --kv-eviction entropykv" in text(found)
    (fresh,) = looks(without(BEFORE, "entropykv"))
    assert fresh.values["vllm:prompt_tokens_total"] == 0
    assert report(fresh, None, URL)["evicts"] is None
    assert "No request has come yet" in text(report(fresh, None, URL))


def test_the_metrics_are_those_that_the_plugin_makes() -> None:
    names = {
        field: f"vllm:entropykv_{name}_total" for field, (name, _) in metrics._COUNTERS.items()
    }
    assert (names["freed"], names["tokens_evicted"]) == (FREED, EVICTED)
    assert set(metrics._GAUGES) == {"hot", "cold"}


@pytest.mark.parametrize("release", RELEASES)
def test_the_others_are_those_that_vllm_makes(release: str) -> None:
    source = sources(release).source("v1.metrics.loggers")
    names = set(re.findall(r"vllm:[a-z_]+", Path(reporting.__file__).read_text()))
    names -= {FREED, EVICTED}
    assert len(names) == 10
    for name in names:
        assert f'name="{name.removesuffix("_total")}"' in source


@pytest.mark.parametrize("given", ["{}", "{}/", "{}/v1", "{}/v1/", "{}/metrics"])
@pytest.mark.parametrize("scheme", ["http://", ""])
def test_the_address_may_be_written_in_any_way(
    scheme: str, given: str, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    address = scheme + given.format(server.url.removeprefix("http://"))
    assert cli.main(["top", address, "--interval", "0.1", "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["url"], found["evicts"], server.asked) == (server.url, True, 2)
    assert found["tokens_out_per_second"] == pytest.approx(62 / found["seconds"])


def test_into_a_pipe_goes_one_table(server: Server) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "entropykv_vllm", "top", server.url, "--interval", "0.1"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    assert done.stdout.count("requests running ") == 1
    assert "all          42    56" in done.stdout


def test_a_terminal_is_redrawn_until_ctrl_c(server: Server) -> None:
    outside, inside = pty.openpty()
    command = [sys.executable, "-m", "entropykv_vllm", "top", server.url, "--interval", "0.1"]
    child = subprocess.Popen(
        command,
        stdout=inside,
        stderr=subprocess.PIPE,
        # Who runs tests in the background has it ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    os.close(inside)
    shown = b""
    while shown.count(b"\x1b[H\x1b[J") < 3:
        shown += os.read(outside, 4096)
    child.send_signal(signal.SIGINT)
    _, said = child.communicate(timeout=30)
    os.close(outside)
    assert (child.returncode, said) == (0, b"")


def test_a_server_that_is_not_there(capsys: pytest.CaptureFixture[str], server: Server) -> None:
    assert cli.main(["top", "127.0.0.1:9", "--once"]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("entropykv top: error: no server answers at http://127.0.0.1:9/")
    server.texts = ("# HELP up\nup 1\n",)
    assert cli.main(["top", server.url]) == 1
    assert "is not that of vLLM" in capsys.readouterr().err
    server.texts = ("<html>no metrics</html>",)
    assert cli.main(["top", server.url]) == 1
    assert "is not that of vLLM" in capsys.readouterr().err


@pytest.mark.parametrize("address", ["http://", "ftp://nowhere", "http://[::1"])
def test_an_address_that_is_none(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    start = time.monotonic()
    assert cli.main(["top", address]) == 1
    assert "no server answers at" in capsys.readouterr().err
    assert time.monotonic() - start < looking.PATIENCE
