# SPDX-License-Identifier: Apache-2.0
"""Whether processes have ended, and what they leave behind."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from pathlib import Path

import psutil


def runs(process: psutil.Process) -> bool:
    """Whether a process does anything; one that ended and that nobody has asked about does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def still_there(processes: Iterable[psutil.Process], seconds: float) -> list[str]:
    """What those say of themselves that have not ended after some seconds."""
    end, left = time.monotonic() + seconds, list(processes)
    while (left := [process for process in left if runs(process)]) and time.monotonic() < end:
        time.sleep(0.1)
    return [str(process) for process in left]


def group_of(leader: int) -> list[psutil.Process]:
    """What runs of a process group, even if its leader does not."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(process.pid) == leader and runs(process):
                found.append(process)
    return found


def shared_by(processes: Iterable[psutil.Process]) -> list[Path]:
    """The files of the shared memory that processes use."""
    paths = {Path(part.path) for process in processes for part in process.memory_maps()}
    return [path for path in paths if path.parent == Path("/dev/shm") and path.exists()]
