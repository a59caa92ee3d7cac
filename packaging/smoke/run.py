# SPDX-License-Identifier: Apache-2.0
"""Installs a wheel into a fresh environment of each Python that there is, and runs `check.py`.

It needs nothing but the standard library. torch comes from where pip is told to look: its build for
CPUs where the index has one for that Python, else the one that the index has.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

PYTHONS = ("3.11", "3.12", "3.13")
CHECK = Path(__file__).with_name("check.py")


def find(version: str) -> str | None:
    """A Python of that version: of the PATH, else of pyenv."""
    return next((path for path in _candidates(version) if _is(path, version)), None)


def _candidates(version: str) -> Iterator[str]:
    if found := shutil.which(f"python{version}"):
        yield found
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    yield from map(str, sorted(root.glob(f"versions/{version}.*/bin/python"), reverse=True))


def _is(path: str, version: str) -> bool:
    """pyenv puts a program of each name on the PATH, which may only say that it is not there."""
    code = "import ensurepip, sys; print('%d.%d' % sys.version_info[:2])"
    done = subprocess.run([path, "-c", code], capture_output=True, text=True)
    return done.returncode == 0 and done.stdout.strip() == version


def install(python: Path, wheel: Path, wishes: list[str]) -> None:
    """The first of the wishes for torch that pip can meet, and the wheel."""
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for wish in wishes:
        if subprocess.run([*pip, wish, str(wheel)]).returncode == 0:
            return
        print(f"no {wish} for {python}", file=sys.stderr)
    raise SystemExit(f"pip finds none of {', '.join(wishes)} for {python}")


def smoke(base: str, wheel: Path, wishes: list[str]) -> None:
    """Check the wheel in an environment that is made for it and removed again."""
    with tempfile.TemporaryDirectory(prefix="smoke-") as folder:
        subprocess.run([base, "-m", "venv", f"{folder}/venv"], check=True)
        python = Path(folder, "venv/bin/python")
        install(python, wheel, wishes)
        # -I: no folder but the environment's own is searched for modules.
        version = wheel.name.split("-")[1]
        subprocess.run([python, "-I", CHECK, version], check=True, cwd=folder)


def main() -> None:
    """Check with every Python; say which ones are not there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--python", nargs="+", default=PYTHONS, metavar="3.N")
    parser.add_argument(
        "--torch", nargs="+", default=["torch"], help="what to ask pip for, the next where it fails"
    )
    options = parser.parse_args()
    found = {version: find(version) for version in options.python}
    for version, base in found.items():
        if base:
            smoke(base, options.wheel.resolve(), options.torch)
        else:
            print(f"Python {version}: NOT CHECKED, there is none on this machine", file=sys.stderr)
    if not any(found.values()):
        raise SystemExit("nothing was checked")


if __name__ == "__main__":
    main()
