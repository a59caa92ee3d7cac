# SPDX-License-Identifier: Apache-2.0
"""Memory and threads, as a server on CPUs would have them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from entropykv_vllm.doctor.check import Check, ok
from entropykv_vllm.doctor.engine import Probed, on_gpu
from entropykv_vllm.plan.sizes import show_bytes

SPACE = "VLLM_CPU_KVCACHE_SPACE"
BIND = "VLLM_CPU_OMP_THREADS_BIND"
THREADS = "OMP_NUM_THREADS"


def checks(probed: Probed) -> list[Check]:
    """All of them; on a GPU the system's memory and threads matter little."""
    if on_gpu(probed):
        return []
    cores = len(os.sched_getaffinity(0))
    return [huge_pages(probed), threads(os.environ, cores), space(os.environ, available())]


def huge_pages(probed: Probed) -> Check:
    """Does the system give huge pages to those who ask?"""
    name, part = "huge pages", probed["pages"]
    if error := part.get("error"):
        return Check(name, "warn", f"not tried: {error}", "Mend what it says.")
    if not part["allowed"]:
        advice = "As root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled."
        return Check(name, "warn", "the system gives none", advice)
    given = f"{show_bytes(part['given'])} of {show_bytes(part['asked'])} asked for"
    if part["given"] < part["asked"] / 2:
        advice = "Free some memory, or as root: echo 1 > /proc/sys/vm/compact_memory."
        return Check(name, "warn", given, advice)
    return ok(name, given)


def threads(environment: Mapping[str, str], cores: int) -> Check:
    """Will a worker compute with all cores?

    Args:
        environment: of the server.
        cores: that it may run on.
    """
    bind, count = environment.get(BIND, "auto"), environment.get(THREADS, "")
    found = f"{THREADS}={count or '(unset)'}, {BIND}={bind}, {cores} cores"
    if bind not in ("nobind", "auto"):
        return ok("threads", found)  # cores named by somebody who knows
    if bind == "auto":
        advice = f"Set {BIND}=nobind and {THREADS}={cores}: else vLLM keeps a core back."
        return Check("threads", "warn", found, advice)
    if count != str(cores):
        advice = f"Set {THREADS}={cores}, unless other programs need cores."
        return Check("threads", "warn", found, advice)
    return ok("threads", found)


def space(environment: Mapping[str, str], free: int) -> Check:
    """Does the KV cache fit in memory?

    Args:
        environment: of the server.
        free: bytes that processes can still get.
    """
    given, room = environment.get(SPACE, ""), max(1, int(free / 2 / 2**30))
    found = f"{SPACE}={given or '(unset)'}, {show_bytes(free)} of memory free"
    advice = f"Set {SPACE} to a number of GiB, such as {room}"
    if not given:
        return Check("KV space", "warn", found, f"{advice}: else vLLM takes most of the memory.")
    if not given.strip().isdecimal() or int(given) < 1:
        return Check("KV space", "fail", found, f"{advice}; vLLM takes whole ones only.")
    if int(given) * 2**30 > free:
        return Check("KV space", "fail", found, f"{advice}, or free memory: it must fit.")
    return ok("KV space", found)


def available() -> int:
    """Bytes that processes can still get: of the machine's, and of what a container may take."""
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    machine = next(int(words[1]) << 10 for words in lines if words[0] == "MemAvailable:")
    limit, used = (_number(Path("/sys/fs/cgroup") / f"memory.{x}") for x in ("max", "current"))
    return machine if limit is None or used is None else min(machine, max(0, limit - used))


def _number(path: Path) -> int | None:
    """The number in a file, if there are both."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
