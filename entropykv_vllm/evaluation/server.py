# SPDX-License-Identifier: Apache-2.0
"""A `vllm serve` of one's own on a free port, which ends with the block that uses it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

from entropykv_vllm.errors import RunError
from entropykv_vllm.evaluation.processes import started
from entropykv_vllm.lifeline import lifeline

SERVED_NAME = "smollm2"
PATIENCE = 600  # seconds until a server must be ready
LAST_LINES = 40  # of the log of one that is not


def free_port() -> int:
    """Return a port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def command(model: str, port: int, arguments: list[str]) -> list[str]:
    """Return the command line that serves `model`."""
    vllm = Path(sys.executable).with_name("vllm")
    return [
        *(str(vllm), "serve", model, "--served-model-name", SERVED_NAME),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", "float32", "--max-model-len", "8192"),
        *arguments,
    ]


def environment(arguments: Sequence[str] = ()) -> dict[str, str]:
    """Return the environment of a server on a CPU; what is set outside wins.

    But for the memory for pages: arguments that name it win, since on CPUs vLLM lets the
    environment win.
    """
    env = {
        "OMP_NUM_THREADS": str(os.cpu_count()),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        **os.environ,
    }
    if "--kv-cache-memory-bytes" in arguments:
        del env["VLLM_CPU_KVCACHE_SPACE"]
    return env


def pool_bytes() -> float:
    """Return the bytes of a server's KV pool."""
    return float(environment()["VLLM_CPU_KVCACHE_SPACE"]) * 2**30


@contextlib.contextmanager
def serving(model: str, arguments: list[str]) -> Iterator[tuple[str, Path]]:
    """Serve a model as long as the block runs; give its URL and its log.

    The log goes with the block, and so does what the server leaves in its folder for such things.

    Raises:
        RunError: if it does not start, with the end of its log.
    """
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="entropykv-") as folder:
        log = Path(folder) / "server.log"
        env = {**environment(arguments), "TMPDIR": folder}
        words, hold = command(model, port, arguments), lifeline(signal.SIGTERM)
        with log.open("w") as sink, started(words, env, sink, hold) as child:
            url = f"http://127.0.0.1:{port}"
            _wait(url, child, log)
            yield url, log


def _wait(url: str, child: subprocess.Popen[str], log: Path) -> None:
    end = time.monotonic() + PATIENCE
    while not is_ready(url):
        if child.poll() is not None or time.monotonic() > end:
            tail = "".join(log.read_text().splitlines(keepends=True)[-LAST_LINES:])
            raise RunError(f"the server did not start:\n{tail}")
        time.sleep(0.5)


def is_ready(url: str) -> bool:
    """Does a server answer at `url`?"""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def counters(url: str) -> dict[str, float]:
    """Return the samples of `/metrics` by name, those of one name added up."""
    from prometheus_client.parser import text_string_to_metric_families

    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            values[sample.name] = values.get(sample.name, 0) + sample.value
    return values
