# SPDX-License-Identifier: Apache-2.0
"""What a command starts ends with it."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

from entropykv_vllm.evaluation import processes

# Starts a process that waits for ever, says which, and waits for it.
PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
child.wait()
"""


def runs(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().split()[2] != "Z"


def test_no_process_outlives_the_block():
    command = [sys.executable, "-c", PARENT]
    with (
        contextlib.suppress(ZeroDivisionError),
        processes.started(command, os.environ, subprocess.PIPE) as child,
    ):
        assert child.stdout is not None
        grandchild = int(child.stdout.readline())
        assert runs(grandchild)
        raise ZeroDivisionError
    assert child.returncode is not None
    assert not runs(grandchild)
