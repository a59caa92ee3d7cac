# SPDX-License-Identifier: Apache-2.0
"""What a server takes while it is driven: its memory and its pool."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import psutil

from entropykv_vllm.evaluation.server import counters

PERIOD = 2.0
#: Seconds until a server that is left alone holds nothing.
REST = 60.0


@dataclass(frozen=True)
class Look:
    """A server at one moment: seconds, MiB of all its processes, share of the pool in use."""

    seconds: float
    megabytes: float
    used: float


class Watch(threading.Thread):
    """Looks at a server until it is told to stop."""

    def __init__(self, url: str, pid: int) -> None:
        super().__init__(daemon=True)
        self.url, self.process = url, psutil.Process(pid)
        self.looks: list[Look] = []
        self.fault: Exception | None = None
        self._begin, self._end = time.monotonic(), threading.Event()

    def run(self) -> None:
        """Look every `PERIOD` seconds."""
        try:
            while not self._end.wait(PERIOD):
                self.looks.append(self._look())
        except Exception as fault:
            self.fault = fault

    def _look(self) -> Look:
        used = counters(self.url)["vllm:kv_cache_usage_perc"]
        return Look(time.monotonic() - self._begin, self.memory(), used)

    def memory(self) -> float:
        """MiB that are a process's own, of the server and all that it started."""
        family = [self.process, *self.process.children(recursive=True)]
        return sum(map(_own, family)) / 2**20

    def stop(self) -> list[Look]:
        """End it; what it saw.

        Raises:
            RuntimeError: it ended before, so of what came then nothing is known.
        """
        self._end.set()
        self.join()
        if self.fault is not None:
            raise RuntimeError("nobody watched the server to the end") from self.fault
        return self.looks


def _own(process: psutil.Process) -> int:
    """Bytes of a process, which may have ended just now."""
    try:
        return int(process.memory_full_info().uss)
    except psutil.NoSuchProcess:
        return 0


def growth(looks: list[Look]) -> tuple[float, float]:
    """MiB by which memory grew in the second half, and the hours in which it did.

    From the third quarter to the fourth, by the least of each: that leaves out what single requests
    take for their time.
    """
    half = looks[len(looks) // 2 :]
    early, late = half[: len(half) // 2], half[len(half) // 2 :]
    grown = min(x.megabytes for x in late) - min(x.megabytes for x in early)
    return grown, (late[0].seconds - early[0].seconds) / 3600


def left_behind(url: str) -> dict[str, float]:
    """What a server still holds once nobody asks."""
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:entropykv_pages")
    end = time.monotonic() + REST
    while True:
        values = counters(url)
        held = {name: values[name] for name in (*names, "vllm:kv_cache_usage_perc")}
        if not any(held.values()) or time.monotonic() > end:
            return {name: value for name, value in held.items() if value}
        time.sleep(1)
