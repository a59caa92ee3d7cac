# SPDX-License-Identifier: Apache-2.0
"""Ray clusters on this machine, whose nodes end with the block that started them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from entropykv_vllm.evaluation.processes import started
from entropykv_vllm.evaluation.server import free_port

PATIENCE = 120  # seconds
OBJECT_STORE = 1 << 28


@contextlib.contextmanager
def cluster(workers: Sequence[int], shadows: Sequence[str | None] = ()) -> Iterator[str]:
    """Start a node for each number in `workers`, which takes so many workers; give its address.

    Args:
        workers: how many workers each node takes.
        shadows: for each node a folder that Python looks in first, if any.
    """
    address = f"127.0.0.1:{free_port()}"
    with contextlib.ExitStack() as stack:
        # Not TMPDIR: the names of Ray's sockets must be short.
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ray", dir="/tmp")))
        for node, count in enumerate(workers):
            shadow = shadows[node] if shadows else None
            _start(stack, address, folder, node, count, shadow)
        yield address


def _start(stack, address: str, folder: Path, node: int, workers: int, shadow: str | None) -> None:
    port = address.rpartition(":")[2]
    place = (
        ["--head", "--port", port, "--include-dashboard", "false", "--temp-dir", str(folder)]
        if node == 0
        else ["--address", address]
    )
    size = ["--num-cpus", "1", "--num-gpus", str(workers), "--object-store-memory"]
    ray = str(Path(sys.executable).with_name("ray"))
    command = [ray, "start", "--block", *place, *size, str(OBJECT_STORE)]
    env = {**os.environ, **({"PYTHONPATH": shadow} if shadow else {})}
    log = stack.enter_context((folder / f"node{node}.log").open("w+"))
    child = stack.enter_context(started(command, env, log))
    _wait(child, log)


def _wait(child: subprocess.Popen, log) -> None:
    end = time.monotonic() + PATIENCE
    while "Ray runtime started" not in _read(log):
        if child.poll() is not None or time.monotonic() > end:
            raise RuntimeError(f"a node of Ray did not start:\n{_read(log)}")
        time.sleep(0.5)


def _read(log) -> str:
    return Path(log.name).read_text()
