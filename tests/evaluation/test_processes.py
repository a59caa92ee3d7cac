# SPDX-License-Identifier: Apache-2.0
"""What a command starts ends with it."""

import contextlib
import os
import subprocess
import sys

import psutil

from entropykv_vllm.evaluation import processes
from tests.crash.gone import runs, still_there

# Starts a process that waits for ever, says which, and waits for it.
PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
child.wait()
"""


def test_no_process_outlives_the_block():
    command = [sys.executable, "-c", PARENT]
    with (
        contextlib.suppress(ZeroDivisionError),
        processes.started(command, os.environ, subprocess.PIPE) as child,
    ):
        assert child.stdout is not None
        grandchild = psutil.Process(int(child.stdout.readline()))
        assert runs(grandchild)
        raise ZeroDivisionError
    assert child.returncode is not None
    assert not runs(grandchild)


# Starts a process as a server is started, says which, and waits.
HOLDER = """
import os, signal, subprocess, sys, time
from entropykv_vllm.evaluation.processes import started
from entropykv_vllm.lifeline import lifeline
words = [sys.executable, "-c", "import time; time.sleep(600)"]
with started(words, os.environ, subprocess.DEVNULL, lifeline(signal.SIGTERM)) as child:
    print(child.pid, flush=True)
    time.sleep(600)
"""


def test_a_server_is_told_to_end_when_whoever_started_it_is_killed():
    with subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE) as holder:
        server = psutil.Process(int(holder.stdout.readline()))
        assert runs(server)
        holder.kill()
    assert still_there([server], seconds=10) == []
