# SPDX-License-Identifier: Apache-2.0
"""What the demo asks a server and how it tells of the answer."""

import http.server
import json
import sys
import tempfile
import threading

import pytest

from entropykv_vllm import cli
from entropykv_vllm.errors import RunError
from entropykv_vllm.evaluation import demo, server

METRICS = """# TYPE vllm:entropykv_pages_freed counter
vllm:entropykv_pages_freed_total{tier="early"} 40.0
vllm:entropykv_pages_freed_total{tier="late"} 2.0
"""


@pytest.fixture
def url():
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(METRICS.encode() if self.path == "/metrics" else b"")

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        threading.Thread(target=httpd.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{httpd.server_port}"
        httpd.shutdown()


def test_metrics_of_all_tiers_are_added_up(url):
    assert server.counters(url)["vllm:entropykv_pages_freed_total"] == 42


def test_a_server_is_ready_when_it_answers(url):
    assert server.is_ready(url)
    assert not server.is_ready(f"http://127.0.0.1:{server.free_port()}")


def test_stock_vllm_gets_no_flags():
    assert demo.arguments("none", "balanced") == []
    assert demo.arguments("norm", None)[:2] == ["--kv-eviction", "norm"]
    assert demo.arguments("norm", "x")[-2:] == ["--kv-eviction-config", "x"]


def test_the_report_says_whether_the_answer_is_right(capsys):
    answer = demo.Answer("It is 1234567.", 6044, 9.5, {demo.FREED: 4200.0}, 8.25, 0.125)
    demo.tell(answer, "1234567")
    demo.tell(answer, "7654321")
    text = capsys.readouterr().out
    assert "right" in text
    assert "wrong, it is 7654321" in text
    assert "6,044 tokens" in text
    assert "4,200" in text
    assert "12.5 %" in text


def test_both_servers_stand_side_by_side(monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "2")
    first = demo.Answer("1234567", 6044, 9.5, {}, 8.25, 0.5)
    again = demo.Answer("765", 6044, 1.5, {demo.FOUND: 6016.0})
    lost = demo.Answer("I do not know", 6044, 1.5, {demo.FOUND: 6016.0})
    kept = demo.Answer("1234567", 6044, 7.5, {demo.FREED: 420.0}, 6.25, 0.125)
    assert demo.rows("1234567", [(first, again), (kept, lost)]) == [
        ["first answer", "1234567, right", "1234567, right"],
        ["MB held while it answered", "1073.7", "268.4"],
        ["pages freed", "0", "420"],
        ["seconds to its first token", "8.2", "6.2"],
        ["second answer", "765, wrong", "no number, wrong"],
        ["tokens found in the cache", "6,016", "6,016"],
        ["seconds for all of it", "1.5", "1.5"],
    ]


def test_a_server_leaves_nothing_behind(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    leave = "import os, sys; open(os.environ['TMPDIR'] + '/left', 'w'); print('out of luck')"
    monkeypatch.setattr(server, "command", lambda *_: [sys.executable, "-c", leave])
    with pytest.raises(RunError, match="did not start:\nout of luck"), server.serving("m", []):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_running_server_is_asked_alone(monkeypatch, capsys):
    answer = demo.Answer("1234567", 6044, 1.5, {demo.FOUND: 6016.0})
    monkeypatch.setattr(demo, "prompt", lambda *_: ("text", "1234567"))
    monkeypatch.setattr(demo, "run", lambda *_: (answer, answer))
    monkeypatch.setattr(demo, "look", lambda *_: None)
    assert demo.main(["--url", "http://127.0.0.1:1/", "--json"]) == 0
    said = capsys.readouterr()
    told = json.loads(said.out)
    assert told["number"] == "1234567"
    assert [a["text"] for a in told["servers"]["http://127.0.0.1:1"]] == ["1234567"] * 2
    assert "6,000 tokens" in said.err


def test_a_server_that_is_not_there_is_told_in_a_sentence(monkeypatch, capsys):
    monkeypatch.setattr(demo, "prompt", lambda *_: ("text", "1234567"))
    assert cli.main(["demo", "--url", "http://127.0.0.1:1"]) == 1
    assert "no server answers at http://127.0.0.1:1/metrics" in capsys.readouterr().err
