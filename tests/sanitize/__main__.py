# SPDX-License-Identifier: Apache-2.0
"""Run the kernels' tests with a build that AddressSanitizer and UBSan watch, and TSan's program."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from . import build

# Those that run what is compiled.
TESTS = ("arguments", "capacity", "cuda_emulated", "emulation", "native", "observe", "rows")
TESTS += ("scores", "select", "layout")


def preloaded() -> str:
    """What must be there before Python: the sanitizer, and the library whose throw it wraps."""
    names = ("libasan.so", "libstdc++.so")
    found = [subprocess.check_output(["g++", f"-print-file-name={n}"], text=True) for n in names]
    return " ".join(str(Path(path.strip()).resolve()) for path in found)


def environment(library: Path, share: float) -> dict[str, str]:
    return os.environ | {
        "SANITIZED_LIBRARY": str(library),
        "LD_PRELOAD": preloaded(),
        # Python and torch leave to the end of the process what they made once.
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "EXAMPLES_SHARE": str(share),
        # Stacks of fibers are memory to AddressSanitizer: it does not see frames go that are left
        # by a jump.
        "EMULATED_CXXFLAGS": " ".join([*build.ADDRESS, "--param=asan-stack=0"]),
        "OMP_NUM_THREADS": "1",
    }


def run(*command, env=None) -> None:
    code = subprocess.run(command, cwd=build.ROOT, env=env).returncode
    if code:
        raise SystemExit(code if code > 0 else 1)


def must_find(what: str, *command, env=None) -> None:
    """A run that would not notice is no run."""
    done = subprocess.run(command, cwd=build.ROOT, env=env, capture_output=True, text=True)
    if done.returncode == 0 or what not in done.stderr:
        raise SystemExit(f"{' '.join(command)} did not find a {what}:\n{done.stderr}")


def test(names: list[str], share: float, more: list[str]) -> None:
    """The kernels' tests, under AddressSanitizer and UBSan."""
    folder = build.BUILD / "address"
    objects = build.kernels(folder, build.ADDRESS, names)
    objects.append(build.compiled(folder, "csrc/ops.cpp", build.ADDRESS))
    torch = [f"-L{build.TORCH / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10"]
    library = folder / "_C.abi3.so"
    build.linked(library, objects, ["-shared", *build.ADDRESS, *torch], names)
    env = environment(library, share)
    must_find("heap-buffer-overflow", sys.executable, "-m", "tests.sanitize.overrun", env=env)
    files = [f"tests/kernels/test_{name}.py" for name in TESTS]
    options = ["-p", "tests.sanitize.plugin", "-p", "no:cacheprovider", "-q", "-x"]
    # All examples of a test take many times as long as without a sanitizer.
    options.append("--timeout=3600")
    run(sys.executable, "-m", "pytest", *options, *more, *files, env=env)


def race(names: list[str]) -> None:
    """The operators on several threads, under ThreadSanitizer."""
    folder = build.BUILD / "thread"
    objects = build.kernels(folder, build.THREAD, names)
    own = ("csrc/ops.cpp", "tests/sanitize/stable.cpp", "tests/sanitize/threads.cpp")
    objects += [build.compiled(folder, source, build.THREAD) for source in own]
    program = str(build.linked(folder / "threads", objects, build.THREAD, names))
    # Addresses at random may lie where TSan wants its own.
    fixed = ["setarch", "-R", program]
    must_find("data race", *fixed, "race")
    run(*fixed)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.sanitize", description=__doc__)
    parser.add_argument("--isas", default="", help="instruction sets, all if none is named")
    parser.add_argument("--share", type=float, default=1, help="of the tests' random examples")
    args, more = parser.parse_known_args()
    names = build.isas(args.isas)
    race(names)
    test(names, args.share, more)


if __name__ == "__main__":
    main()
