# SPDX-License-Identifier: Apache-2.0
"""Call the operators with what a fuzzer makes up: they refuse it or stay within their memory."""

from __future__ import annotations

import argparse
import random
import shutil
import subprocess
from pathlib import Path

from . import build

FOLDER = build.ROOT / "build/fuzz-ops"
#: The kernels are GCC's; what checks their arguments is clang's, so that libFuzzer sees its paths.
CLANGS = ("clang++-14", "clang++")
KINDS, SEEDS = 6, 10


def clang() -> str | None:
    """A clang that has libFuzzer, if there is one."""
    for name in filter(shutil.which, CLANGS):
        library = subprocess.check_output(
            [name, "-print-file-name=libclang_rt.fuzzer-x86_64.a"], text=True
        )
        if Path(library.strip()).is_file():
            return name
    return None


def program(compiler: str, names: list[str]) -> Path:
    objects = build.kernels(build.BUILD / "address", build.ADDRESS, names)
    watched = [*build.ADDRESS, "-fsanitize=fuzzer"]
    own = ("csrc/ops.cpp", "tests/sanitize/stable.cpp", "tests/sanitize/fuzz_ops.cpp")
    objects += [build.compiled(FOLDER, source, watched, compiler) for source in own]
    return build.linked(FOLDER / "fuzz_ops", objects, [*watched, "-lgcc"], names, compiler)


def corpus() -> Path:
    """Where inputs that found something new are kept; the first ones are calls of each kind."""
    folder = FOLDER / "corpus"
    folder.mkdir(parents=True, exist_ok=True)
    for kind in range(KINDS):
        for seed in range(SEEDS):
            # Numbers are taken from the end on, and the first is the kind.
            text = random.Random(seed).randbytes(300) + bytes([kind])
            (folder / f"seed-{kind}-{seed}").write_bytes(text)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.sanitize.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--isas", default="generic best", help="instruction sets")
    parser.add_argument("input", nargs="*", help="play these again, as a failure names them")
    args = parser.parse_args()
    compiler = clang()
    if not compiler:
        print("skipped: needs clang with libFuzzer (Debian's clang-14 and libclang-rt-14-dev)")
        return
    fuzzer = str(program(compiler, build.isas(args.isas)))
    options = ["-seed=1", "-timeout=20", f"-artifact_prefix={FOLDER}/"]
    limits = [f"-max_total_time={args.seconds}", "-print_final_stats=1", str(corpus())]
    done = subprocess.run([fuzzer, *options, *(args.input or limits)], cwd=build.ROOT)
    raise SystemExit(done.returncode)


if __name__ == "__main__":
    main()
