# SPDX-License-Identifier: Apache-2.0
"""Whether processes have ended."""

from __future__ import annotations

import time
from collections.abc import Iterable

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
