# SPDX-License-Identifier: Apache-2.0
"""Put each bug into a copy of the project, run the tests that must catch it, and say which did."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

import hypothesis
import pytest

from .bugs import BUGS, Bug

ROOT = Path(__file__).parents[2]
#: What tests import that takes seconds.
SLOW = ("torch", "vllm.v1.worker.cpu_worker", "vllm.v1.worker.gpu_worker", "vllm.engine.arg_utils")


#: Where tests cannot even begin: nothing caught the bug, which is none that a test could meet.
NO_TEST = "before any test"


def failed_in(text: str) -> str | None:
    """The test that failed, or ended the process, by what was printed."""
    failed = re.search(r"^(?:FAILED|ERROR) \S*?([^/\s]+\.py::\w+)", text, re.MULTILINE)
    # One that ends the process stands among the functions that Python names then.
    ended = re.search(r'/(test_\w+\.py)", line \d+ in (test_\w+)', text)
    return failed[1] if failed else "::".join(ended.groups()) if ended else None


class Copy:
    """The project as it is in the working tree, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.check_output(listed, cwd=ROOT, text=True).split("\0")
        built = [str(path.relative_to(ROOT)) for path in ROOT.glob("entropykv_vllm/*.so")]
        for name in [*names, *built]:
            if name and (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)

    def test(self, *files: str) -> tuple[str | None, str]:
        """Run tests up to the first that fails; its name if one does, and what was printed.

        In a process forked from this one, which has vLLM but nothing of the project: importing vLLM
        takes longer than most of these tests.
        """
        printed = self.folder / "printed.txt"
        child = os.fork()
        if child == 0:
            with printed.open("w") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            os._exit(_status(self.folder, files))
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        text = printed.read_text()
        return (None if status == 0 else failed_in(text) or NO_TEST), text

    def build(self) -> None:
        command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
        env = os.environ | {"ENTROPYKV_CUDA": "0"}
        done = subprocess.run(command, cwd=self.folder, env=env, text=True, capture_output=True)
        if done.returncode:
            raise SystemExit(f"the kernels do not build:\n{done.stderr}")

    def caught(self, bug: Bug) -> str | None:
        """The test that catches a bug, if one does; the copy is whole again afterwards."""
        path = self.folder / bug.file
        text = path.read_text()
        path.write_text(bug.put_into(text))
        try:
            if bug.compiled:
                self.build()
            return self.test(bug.tests)[0]
        finally:
            path.write_text(text)


def _warm_up() -> None:
    """Import what takes long, and nothing of the project, of which each copy has its own."""
    os.environ["VLLM_PLUGINS"] = ""  # ours are found by vLLM, wherever they are installed
    from tests import conftest

    del conftest
    for name in SLOW:
        importlib.import_module(name)
    ours = [name for name in sys.modules if name.partition(".")[0] == "entropykv_vllm"]
    assert not ours, f"{ours} are imported, so their copies would not be"


def _status(folder: Path, files: tuple[str, ...]) -> int:
    """How a run ended; an error of its own must not go on in what forked it."""
    try:
        return _pytest(folder, files)
    except BaseException:
        traceback.print_exc()
        return 1


def _pytest(folder: Path, files: tuple[str, ...]) -> int:
    """Run tests of a copy in this process."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    os.chdir(folder)
    sys.path[:0] = [str(folder)]
    sys.dont_write_bytecode = True
    # A slow machine is no bug.
    hypothesis.settings.register_profile("patient", deadline=None)
    hypothesis.settings.load_profile("patient")
    options = ("-x", "-q", "-rfE", "-p", "no:cacheprovider", "--hypothesis-seed=0")
    code = pytest.main([*options, *files])
    import entropykv_vllm

    assert Path(entropykv_vllm.__file__).is_relative_to(folder), "the copy was not tested"
    sys.stdout.flush()
    return int(code)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--only", default="", help="bugs whose name or file has this in it")
    parser.add_argument("--as-it-is", action="store_true", help="do not run the tests without bugs")
    args = parser.parse_args()
    _warm_up()
    bugs = [bug for bug in BUGS if args.only in bug.name or args.only in bug.file]
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy(Path(folder))
        if not args.as_it_is:
            failed, printed = copy.test(*sorted({bug.tests for bug in bugs}))
            if failed:
                raise SystemExit(f"without any bug, {failed} fails:\n{printed}")
        # What is compiled stays so until it is built again: those come last.
        missed = [bug.name for bug in sorted(bugs, key=lambda b: b.compiled) if not _one(copy, bug)]
    print(f"{len(bugs) - len(missed)} of {len(bugs)} are caught")
    return 1 if missed else 0


def _one(copy: Copy, bug: Bug) -> bool:
    began = time.monotonic()
    by = copy.caught(bug)
    seconds = time.monotonic() - began
    print(f"| {bug.name} | `{bug.file}` | {f'`{by}`' if by else 'NONE'} | {seconds:.0f} s |")
    sys.stdout.flush()
    return by not in (None, NO_TEST)


if __name__ == "__main__":
    sys.exit(main())
