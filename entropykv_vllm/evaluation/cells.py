# SPDX-License-Identifier: Apache-2.0
"""Runs measurements one after the other, each in a process of its own, and keeps their results.

An engine cannot change its policy, and a process that once held one is not like a fresh one. So
each cell of a table is `python -m MODULE SPEC RESULT`. A result holds the specification it
answers; if that is unchanged the cell is not run again, so an interrupted table goes on where it
stopped.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from entropykv_vllm.errors import RunError
from entropykv_vllm.evaluation.processes import started

PROGRESS = "@progress"


def report(done: int, total: int) -> None:
    """Tell the parent process how far the cell is."""
    print(PROGRESS, done, total, flush=True)


def stored(spec: Mapping[str, Any], result: Path) -> dict[str, Any] | None:
    """Return a finished result of this very specification, if there is one."""
    if not result.is_file():
        return None
    found: dict[str, Any] = json.loads(result.read_text())
    return found if found.get("spec") == json.loads(json.dumps(spec)) else None


def store(spec: Mapping[str, Any], values: Mapping[str, Any], result: Path) -> None:
    """Write a result in one rename, so that a killed cell leaves nothing half written."""
    part = result.with_suffix(".part")
    part.write_text(json.dumps({"spec": spec, **values}, indent=1) + "\n")
    part.replace(result)


def environment(policy: str) -> dict[str, str]:
    """Return the environment of a cell: all cores, and for stock vLLM no plugin at all."""
    env = dict(os.environ)
    env.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would override the pool that a cell asks for
    env.setdefault("OMP_NUM_THREADS", str(os.cpu_count()))
    env.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # else vLLM keeps a core back
    if policy == "none":
        env["VLLM_PLUGINS"] = ""
    return env


def run(
    module: str,
    spec: Mapping[str, Any],
    result: Path,
    progress: Callable[[int, int], None] = lambda done, total: None,
    settings: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return the result of a cell, running it if need be; `settings` go into its environment.

    Raises:
        RunError: if the process fails; the end of its log is in the text.
    """
    if (old := stored(spec, result)) is not None:
        return old
    result.parent.mkdir(parents=True, exist_ok=True)
    log = result.with_suffix(".log")
    command = [sys.executable, "-m", module, json.dumps(spec), str(result)]
    env = {**environment(spec["policy"]), **(settings or {})}
    with log.open("w") as sink, started(command, env, subprocess.PIPE) as child:
        _follow(child, sink, progress)
    if (new := stored(spec, result)) is None:
        tail = "".join(log.read_text().splitlines(keepends=True)[-15:])
        raise RunError(f"{module} failed, see {log}:\n{tail}")
    return new


def _follow(child: Any, sink: Any, progress: Callable[[int, int], None]) -> None:
    for line in child.stdout:
        if line.startswith(PROGRESS):
            done, total = line.split()[1:]
            progress(int(done), int(total))
        else:
            sink.write(line)
            sink.flush()


def main(measure: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Be the child process: read the specification, measure, store."""
    spec = json.loads(sys.argv[1])
    store(spec, measure(spec), Path(sys.argv[2]))
