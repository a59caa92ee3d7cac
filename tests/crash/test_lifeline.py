# SPDX-License-Identifier: Apache-2.0
"""Processes that end with the one that started them, however that ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from .gone import runs, still_there

# Starts a process as vLLM starts its engine core, says which, and waits.
PARENT = """
import multiprocessing, pathlib, signal, sys, time
from entropykv_vllm.lifeline import end_with_parent

def heed(number, frame):
    pathlib.Path({told!r}).touch()
    if not {deaf}:
        sys.exit()

def child():
    signal.signal(signal.SIGTERM, heed)
    end_with_parent(patience=2)
    print(multiprocessing.current_process().pid, flush=True)
    time.sleep(600)

if __name__ == "__main__":
    multiprocessing.get_context({method!r}).Process(target=child).start()
    time.sleep(600)
"""


@pytest.mark.parametrize("method", ["spawn", "fork"])
@pytest.mark.parametrize("deaf", [False, True])
def test_a_process_ends_soon_after_the_one_that_started_it_was_killed(
    tmp_path: Path, method: str, deaf: bool
) -> None:
    script, told = tmp_path / "parent.py", tmp_path / "told"
    script.write_text(PARENT.format(method=method, deaf=deaf, told=str(told)))
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        assert runs(child)
        parent.kill()
        parent.wait()
        try:
            assert still_there([child], seconds=10) == []
            assert told.exists(), "it was killed before it was asked"
        finally:
            if runs(child):
                child.kill()
