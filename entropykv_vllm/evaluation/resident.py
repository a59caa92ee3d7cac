# SPDX-License-Identifier: Apache-2.0
"""Resident memory of this process, as Linux counts it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

SELF = Path("/proc/self")


def status(name: str) -> int:
    """Return a figure of `/proc/self/status`, such as `VmRSS` or `VmHWM`, in bytes."""
    lines = (line.split() for line in (SELF / "status").read_text().splitlines())
    return next(int(words[1]) << 10 for words in lines if words[0] == f"{name}:")


def growth(call: Callable[[], object]) -> int:
    """Call, and return how many bytes more than before were resident at the peak."""
    # What was freed before, but not given back to the system, would be used without growing.
    ctypes.CDLL(None).malloc_trim(0)
    (SELF / "clear_refs").write_text("5")  # the peak is counted anew
    before = status("VmRSS")
    call()
    return max(0, status("VmHWM") - before)


def available() -> int:
    """Return the bytes that processes can still get without swapping."""
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    return next(int(words[1]) << 10 for words in lines if words[0] == "MemAvailable:")
