# SPDX-License-Identifier: Apache-2.0
"""A server of one's own that answers as others do, or does not."""

import json
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest

from entropykv_vllm.errors import RunError
from entropykv_vllm.evaluation.endpoint import Endpoint
from entropykv_vllm.evaluation.together import together
from tests.evaluation.letters import Letters

TOKENIZER = Letters()


class Server(BaseHTTPRequestHandler):
    """Answers with its prompt in capitals."""

    takes_ids = True
    fails = 0
    models: bytes | None = None
    answer: bytes | None = None
    keys: ClassVar[list] = []

    def do_GET(self):
        self._reply(200, self.models or {"data": [{"id": "first"}, {"id": "second"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.keys.append(self.headers["Authorization"])
        prompt = body["prompt"]
        if self.answer is not None:
            self._reply(200, self.answer)
        elif self.fails:
            self._reply(self.fails, {"error": {"message": "out of\nluck"}})
        elif isinstance(prompt, list) and not self.takes_ids:
            self._reply(400, {"error": {"message": "prompt must be a string"}})
        else:
            text = TOKENIZER.decode(prompt) if isinstance(prompt, list) else prompt
            answer = f"{body['model']} {body['temperature']} {text.upper()}"[: body["max_tokens"]]
            self._reply(200, {"choices": [{"text": answer}]})

    def _reply(self, status, values):
        data = values if isinstance(values, bytes) else json.dumps(values).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


@pytest.fixture
def handler():
    return type("Handler", (Server,), {"keys": []})


@pytest.fixture
def url(handler):
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()


PROMPTS = [TOKENIZER.encode(text) for text in ("one", "two", "three", "four", "five", "six")]
ANSWERS = [f"first 0 {word}" for word in ("ONE", "TWO", "THREE", "FOUR", "FIVE", "SIX")]


@pytest.mark.parametrize("takes_ids", [True, False])
def test_answers_come_in_order_whatever_form_the_server_takes(url, handler, takes_ids):
    handler.takes_ids = takes_ids
    server = Endpoint(url, TOKENIZER)
    assert list(server.answers(PROMPTS, 20)) == ANSWERS
    assert server.takes_ids is takes_ids


def test_the_model_and_the_length_asked_for_are_sent(url):
    assert Endpoint(url + "/", TOKENIZER, "second").complete(PROMPTS[0], 10) == "second 0 O"


@pytest.mark.parametrize("status", [400, 500])
def test_what_the_server_complains_about_is_said(url, handler, status):
    handler.fails = status
    with pytest.raises(RuntimeError, match=f"/completions says {status}: out of luck"):
        list(Endpoint(url, TOKENIZER).answers(PROMPTS, 10))


def test_nobody_there():
    with pytest.raises(RuntimeError, match="9/v1/models does not answer"):
        Endpoint("http://127.0.0.1:9/v1", TOKENIZER)


def test_the_key_of_the_environment_is_sent(url, handler, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "abc")
    Endpoint(url, TOKENIZER, "m").complete(PROMPTS[0], 5)
    monkeypatch.delenv("OPENAI_API_KEY")
    Endpoint(url, TOKENIZER, "m").complete(PROMPTS[0], 5)
    assert handler.keys == ["Bearer abc", None]


@pytest.mark.parametrize("reply", [b"[]", b'{"data": []}', b'{"data": [{}]}', b"\xff\xfe", b"3"])
def test_models_that_are_none_are_said_to_be_none(url, handler, reply):
    handler.models = reply
    with pytest.raises(RunError, match=r"/v1/models (names no model|does not answer with JSON)"):
        Endpoint(url, TOKENIZER)


@pytest.mark.parametrize(
    "reply",
    [
        b'{"choices": [{"text": null}]}',
        b'{"choices": []}',
        b'{"error": "no"}',
        b"null",
        b"",
        b"\x00\xff",
    ],
)
def test_a_reply_without_a_text_is_no_answer(url, handler, reply):
    handler.answer = reply
    with pytest.raises(RunError, match=r"/v1/completions (answers without a text|does not answer)"):
        Endpoint(url, TOKENIZER, "m").complete(PROMPTS[0], 5)


def test_answers_before_a_failure_are_given(url, handler):
    answers = Endpoint(url, TOKENIZER).answers(PROMPTS, 20)
    assert next(answers) == ANSWERS[0]
    handler.fails = 500
    with pytest.raises(RunError, match="says 500"):
        next(answers)


def test_calls_that_hang_are_not_waited_for():
    release, started = threading.Event(), []

    def call(item):
        started.append(item)
        if item == 0:
            raise KeyError(item)
        release.wait(60)

    began = time.monotonic()
    with pytest.raises(KeyError):
        list(together(call, range(10), 3))
    assert time.monotonic() - began < 10
    release.set()
    assert len(started) <= 4


def test_a_process_ends_though_a_call_hangs():
    code = (
        "import time; from entropykv_vllm.evaluation.together import together; "
        "print(next(together(lambda n: time.sleep(n) or n, [0, 600], 2)))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, b"0\n")
