# SPDX-License-Identifier: Apache-2.0
"""Compiles `csrc/` for a sanitizer, beside the build that everything else uses."""

from __future__ import annotations

import os
import runpy
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
BUILD = ROOT / "build/sanitize"
SETUP = runpy.run_path(str(ROOT / "setup.py"), run_name="setup")
TORCH = Path(find_spec("torch").origin).parent

#: The name of each instruction set's table, and its source.
ISAS = {Path(source).stem.removeprefix("isa_"): source for source in SETUP["ISA_FLAGS"]}

# A wrong step ends the process, so no test can pass over it.
WATCHED = ["-g", "-O1", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all"]
ADDRESS = [*WATCHED, "-fsanitize=address,undefined"]
# These look at each step through a pointer, which takes minutes to compile in what is all inlined;
# AddressSanitizer sees where such a step ends.
ADDRESS += ["-fno-sanitize=null,object-size,pointer-overflow,alignment"]
THREAD = [*WATCHED, "-fsanitize=thread"]


def isas(named: str) -> list[str]:
    """The instruction sets of a list: all, if there is none; "best" is this machine's."""
    from entropykv_vllm.kernels import native

    wanted = {native.isa() if name == "best" else name for name in named.split()}
    if unknown := wanted - set(ISAS):
        raise SystemExit(f"there is no {', '.join(unknown)}, only {', '.join(ISAS)}")
    return [name for name in ISAS if name in wanted | {"generic"} or not wanted]


def kernels(folder: Path, flags: list[str], names: list[str]) -> list[Path]:
    """The objects of some instruction sets, and of what chooses among them."""
    own = {ISAS[n]: [*SETUP["ISA_FLAGS"][ISAS[n]], "-fno-exceptions", "-fno-rtti"] for n in names}
    own["csrc/cpu/dispatch.cpp"] = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(lambda path: compiled(folder, path, [*own[path], *flags]), own))


def compiled(folder: Path, source: str, flags: list[str], compiler: str = "g++") -> Path:
    """The object of a source, made if something that it was made of is newer."""
    macros = [f"-D{name}={value}" for name, value in SETUP["STABLE_ABI"]]
    paths = [TORCH / "include", sysconfig.get_paths()["include"]]
    command = [compiler, *SETUP["FLAGS"], "-fPIC", *macros, *(f"-isystem{p}" for p in paths)]
    made = folder / f"{Path(source).stem}.o"
    listed = made.with_suffix(".d")
    # "made.o: source headers", in lines that end with a backslash.
    of = listed.read_text().replace("\\\n", " ").split()[1:] if listed.exists() else [source]
    command += [*flags, "-MMD", "-c", source, "-o", str(made)]
    _make(made, command, [ROOT / path for path in of])
    return made


def linked(made: Path, objects: list[Path], flags: list[str], names: list[str], compiler="g++"):
    """A program or a library of objects, with the names of the instruction sets that are there.

    The others are the plain one under another name, which counts as one that the CPU lacks.
    """
    generic = _table("generic")
    absent = [f"-Wl,--defsym={_table(name)}={generic}" for name in ISAS if name not in names]
    command = [compiler, *map(str, objects), *absent, *flags, "-pthread", "-o", str(made)]
    _make(made, command, objects)
    return made


def _table(isa: str) -> str:
    """The symbol of `entropykv::kAvx2`, ..."""
    name = "k" + "".join(part.capitalize() for part in isa.split("_"))
    return f"_ZN9entropykv{len(name)}{name}E"


def _make(made: Path, command: list[str], of: list[Path]) -> None:
    stamp, text = made.with_name(f"{made.name}.command"), " ".join(command)
    same = made.exists() and stamp.exists() and stamp.read_text() == text
    if same and all(path.exists() and path.stat().st_mtime <= made.stat().st_mtime for path in of):
        return
    made.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(command, cwd=ROOT, check=True)
    stamp.write_text(text)
