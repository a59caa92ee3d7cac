# SPDX-License-Identifier: Apache-2.0
"""Processes that start others, as vLLM does, and leave none behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from typing import IO


@contextlib.contextmanager
def started(
    command: list[str],
    env: Mapping[str, str],
    output: int | IO[str],
    hold: Callable[[], None] | None = None,
) -> Iterator[subprocess.Popen[str]]:
    """Start a process that starts others, as vLLM does; none of them outlives the block.

    `hold` is a `lifeline` for one that would go on if this process were killed.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # end as after Ctrl-C
    child = subprocess.Popen(
        command,
        env=env,
        stdout=output,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # a process group of its own, so it can be ended as one
        preexec_fn=hold,
    )
    try:
        yield child
    finally:
        stop_group(child)


def stop_group(child: subprocess.Popen[str], patience: float = 10) -> None:
    """End all processes of a group: ask first, insist after `patience` seconds."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        alive = _signal(child, number)
        end = time.monotonic() + patience
        while alive and time.monotonic() < end:
            time.sleep(0.1)
            alive = _signal(child, 0)
        if not alive:
            return


def _signal(child: subprocess.Popen[str], number: int) -> bool:
    child.poll()  # a dead leader that nobody asks about would count as alive
    try:
        os.killpg(child.pid, number)
    except ProcessLookupError:
        return False
    return True
