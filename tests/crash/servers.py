# SPDX-License-Identifier: Apache-2.0
"""Servers that are killed, one after the other on one port, and their clients."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from entropykv_vllm.evaluation import corpus
from entropykv_vllm.evaluation.processes import started
from entropykv_vllm.evaluation.server import (
    SERVED_NAME,
    command,
    environment,
    free_port,
    is_ready,
)

from ..engine.conftest import model_folder
from .gone import group_of

#: Seconds until a server answers, or has refused to start.
PATIENCE = 280
#: So small that `QUESTION` is evicted from.
SETTINGS = {"bits": 16, "keep": 0.25, "window": 128, "interval": 128}
ARGUMENTS = [
    *("--kv-eviction", "entropykv", "--kv-eviction-config", json.dumps(SETTINGS)),
    *("--kv-cache-memory-bytes", str(1 << 28), "--max-model-len", "4096", "--enforce-eager"),
]
#: Tokens of an answer that takes longer than any test.
ENDLESS = 3500

PATH = "/v1/completions"
#: The continuation of some English.
QUESTION = {"model": SERVED_NAME, "prompt": corpus.text()[:2000], "ignore_eos": True}

Wrap = Callable[[list[str]], list[str]]


def answers(url: str) -> bool:
    """Whether a server answers a question."""
    body = json.dumps({**QUESTION, "max_tokens": 4, "temperature": 0}).encode()
    request = urllib.request.Request(url + PATH, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        return bool(json.load(answer)["choices"][0]["text"])


class Stream(threading.Thread):
    """A client whose answer comes piece by piece."""

    def __init__(self, port: int, tokens: int = ENDLESS) -> None:
        super().__init__(daemon=True)
        self.pieces, self.begun, self.tokens = list[str](), threading.Event(), tokens
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)

    def run(self) -> None:
        """Read to the end, which may be one in the middle of a piece."""
        with contextlib.suppress(OSError, http.client.HTTPException):
            body = json.dumps({**QUESTION, "stream": True, "max_tokens": self.tokens})
            self.connection.request("POST", PATH, body, {"Content-Type": "application/json"})
            for line in self.connection.getresponse():
                if line.startswith(b"data: "):
                    self.pieces.append(line.removeprefix(b"data: ").strip().decode())
                    self.begun.set()

    def begin(self) -> Stream:
        """Ask, and wait for the first piece."""
        self.start()
        assert self.begun.wait(PATIENCE), "no piece of the answer came"
        return self

    def ends(self, seconds: float) -> bool:
        """Whether the client knows within some seconds that no more will come."""
        self.join(seconds)
        return not self.is_alive()

    def leave(self) -> None:
        """Close the connection, whatever may still come."""
        self.connection.sock.shutdown(socket.SHUT_RDWR)


class Server:
    """A server that was started, with arguments of its own."""

    def __init__(self, child: subprocess.Popen[str], port: int, log: Path, more: tuple) -> None:
        self.child, self.port, self.log, self.more = child, port, log, more
        self.url = f"http://127.0.0.1:{port}"

    def family(self) -> list[psutil.Process]:
        """It, and all it started that runs."""
        return group_of(self.child.pid)

    def part(self, title: str) -> psutil.Process:
        """The process that vLLM gives this title."""
        return next(p for p in self.family() if title in " ".join(p.cmdline()))

    def said(self) -> str:
        """What it has logged so far."""
        return self.log.read_text()


class Servers:
    """One server at a time, each on the port of the one before."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self._now: Server | None = None
        self._stack = contextlib.ExitStack()

    def running(self, *more: str) -> Server:
        """The server that runs with such arguments, or a new one."""
        now = self._now
        if now is None or now.child.poll() is not None or now.more != more:
            return self.start(*more)
        return now

    def start(self, *more: str, wrap: Wrap = list, **environ: str) -> Server:
        """Start another one instead of the present one, and wait until it answers."""
        self.stop()
        log = self.folder / "server.log"
        words, env = wrap(self.words(*more)), self.environ(**environ)
        sink = self._stack.enter_context(log.open("w"))
        child = self._stack.enter_context(started(words, env, sink))
        self._now = Server(child, self.port, log, more)
        self._wait(self._now)
        return self._now

    def _wait(self, server: Server) -> None:
        end = time.monotonic() + PATIENCE
        while not is_ready(server.url):
            assert server.child.poll() is None, server.said()[-4000:]
            assert time.monotonic() < end, server.said()[-4000:]
            time.sleep(0.2)

    def words(self, *more: str) -> list[str]:
        """The command line of a server on this port."""
        return command(model_folder(), self.port, [*ARGUMENTS, *more])

    def environ(self, **environ: str) -> dict[str, str]:
        """What a server finds in its environment; its sockets lie in a folder of the test's."""
        # TMP is where Python looks if there is no room in TMPDIR.
        own = {name: str(self.folder) for name in ("TMPDIR", "TMP")}
        own |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "OMP_NUM_THREADS": "1"}
        return {**environment(ARGUMENTS), **own, **environ}

    def stop(self) -> None:
        """End the present one, and all that is left of it."""
        self._now = None
        self._stack.close()


@contextlib.contextmanager
def servers_in(folder: Path) -> Iterator[Servers]:
    """Servers of which none outlives the block."""
    servers = Servers(folder)
    try:
        yield servers
    finally:
        servers.stop()
