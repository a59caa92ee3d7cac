# SPDX-License-Identifier: Apache-2.0
"""`vllm serve` on a Ray cluster of two nodes: answers, a worker that dies, a node that lacks us."""

import json
import os
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request

import psutil
import pytest

from entropykv_vllm.evaluation.server import (
    SERVED_NAME,
    command,
    environment,
    free_port,
    is_ready,
    serving,
)
from entropykv_vllm.version import __version__

from ..engine.conftest import model_folder
from .conftest import SETTINGS, TOKENS
from .ray_nodes import cluster

pytestmark = pytest.mark.cluster

ARGUMENTS = [
    *("--kv-eviction", "entropykv", "--kv-eviction-config", json.dumps(SETTINGS)),
    *("--distributed-executor-backend", "ray", "-pp", "2", "--enforce-eager"),
]
#: Seconds until a client must know that a worker died, and until the server must be gone.
SOON = 60


@pytest.fixture
def on(monkeypatch, tmp_path_factory):
    """Return a function that makes servers join a cluster.

    Workers look for packages in the folder that a server was started in: not in the sources.
    """
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    return lambda address: monkeypatch.setenv("RAY_ADDRESS", address)


def complete(url: str, **body) -> dict:
    body = {"model": SERVED_NAME, "temperature": 0, "ignore_eos": True, **body}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.load(answer)


def workers_of(server: str) -> list[psutil.Process]:
    return [
        p
        for p in psutil.process_iter(["cmdline"])
        if p.info["cmdline"] and server in p.info["cmdline"][0]
    ]


def test_two_nodes_and_a_worker_that_dies(on, prompts, alone):
    with cluster([1, 1]) as address:
        on(address)
        with serving(model_folder(), ARGUMENTS) as (url, log):
            found = complete(url, prompt=prompts, max_tokens=TOKENS, return_token_ids=True)
            assert [choice["token_ids"] for choice in found["choices"]] == alone
            assert log.read_text().count("EntropyKV kernels:") >= 2, "a worker does not evict"
            kill_in_mid_request(url)


def kill_in_mid_request(url: str) -> None:
    """A client that waits gets an error soon, and then the server goes, as vLLM's does."""
    caught = []

    def wait() -> None:
        try:
            complete(url, prompt="Once upon a time", max_tokens=3000)
        except (urllib.error.URLError, OSError) as error:
            caught.append(error)

    client = threading.Thread(target=wait)
    client.start()
    time.sleep(3)
    os.kill(workers_of("ray::RayWorkerProc")[-1].pid, signal.SIGKILL)
    client.join(SOON)
    assert not client.is_alive(), "the client still waits"
    assert isinstance(caught[0], urllib.error.HTTPError), caught
    assert caught[0].code == 500
    end = time.monotonic() + SOON
    while is_ready(url) and time.monotonic() < end:
        time.sleep(0.5)
    assert not is_ready(url)


@pytest.mark.parametrize(
    ("package", "says"),
    [
        ({"__init__.py": "raise ModuleNotFoundError('lost')"}, "none (ModuleNotFoundError: lost)"),
        ({"__init__.py": "", "version.py": "__version__ = '0.0.1'"}, "0.0.1"),
    ],
    ids=["missing", "old"],
)
def test_a_node_without_this_version_stops_the_server(on, tmp_path, package, says):
    shadow = tmp_path / "entropykv_vllm"
    shadow.mkdir()
    for name, text in package.items():
        (shadow / name).write_text(text)
    with cluster([1, 1], [None, str(tmp_path)]) as address:
        on(address)
        arguments = command(model_folder(), free_port(), ARGUMENTS)
        server = subprocess.run(
            arguments, env=environment(), capture_output=True, text=True, timeout=300
        )
    assert server.returncode
    sentence = f"every node of the Ray cluster needs EntropyKV {__version__}, but "
    assert sentence in server.stdout + server.stderr
    assert f" has {says}: install entropykv-vllm" in server.stdout + server.stderr
