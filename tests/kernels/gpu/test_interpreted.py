# SPDX-License-Identifier: Apache-2.0
"""The kernels for GPUs against the reference, in Triton's interpreter: see `interpreted`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

FOLDER = Path(__file__).parent / "interpreted"
ROOT = FOLDER.parents[3]


@pytest.mark.slow
@pytest.mark.parametrize("module", sorted(x.stem for x in FOLDER.glob("test_*.py")))
def test_interpreted(module):
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"{FOLDER}/{module}.py"],
        env={
            **os.environ,
            "TRITON_INTERPRET": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(paths),
        },
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert " passed" in found.stdout
