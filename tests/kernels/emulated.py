# SPDX-License-Identifier: Apache-2.0
"""Builds the CUDA kernels with the C++ compiler, over an emulation of a GPU."""

import ctypes
import hashlib
import os
import subprocess
import sysconfig
import tempfile
from functools import lru_cache
from pathlib import Path

import torch
import torch.utils.cpp_extension as torch_build

CUDA = Path(__file__).parents[2] / "csrc/cuda"
EMULATION = CUDA / "emulation"
FLAGS = ["-std=c++17", "-O2", "-fno-strict-aliasing", "-fPIC", "-shared", "-Wall", "-Wno-psabi"]
# Those of `make sanitize`.
FLAGS += os.environ.get("EMULATED_CXXFLAGS", "").split()
# Few enough that the calls of the tests are cut into several launches.
LIMITS = ["-DEKV_MOST_BYTES=60000", "-DEKV_MAX_LAYERS=2"]


def build(*arguments, sources, depends=(), libraries=()):
    """The path of a shared library, compiled unless one of the same text lies there already."""
    command = ["g++", *FLAGS, *map(str, arguments), "-x", "c++", *map(str, sources)]
    command += [f"-l{name}" for name in libraries]
    text = [path.read_bytes() for path in sorted({*sources, *depends})]
    text += [" ".join(command).encode(), torch.__version__.encode()]
    name = hashlib.sha256(b"\0".join(text)).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"entropykv-emulated-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    library = folder / f"{name}.so"
    if not library.exists():
        made = library.with_suffix(f".{os.getpid()}")
        subprocess.run([*command, "-o", str(made)], check=True)
        made.rename(library)
    return library


@lru_cache(maxsize=1)
def load():
    """Registers `torch.ops.entropykv_emulated`; returns the library, for its seed."""
    includes = [*torch_build.include_paths(), sysconfig.get_paths()["include"]]
    arguments = [*LIMITS, "-DEKV_EMULATED", *(f"-isystem{path}" for path in includes)]
    arguments += ["-DTORCH_TARGET_VERSION=0x020a000000000000", "-DPy_LIMITED_API=0x030b0000"]
    arguments += [f"-L{path}" for path in torch_build.library_paths()]
    headers = [*CUDA.glob("*.cuh"), *CUDA.glob("*.h"), EMULATION / "cuda.h"]
    sources = [*sorted(CUDA.glob("*.cu")), EMULATION / "fibers.cpp", CUDA / "ops.cpp"]
    library = build(
        *arguments,
        sources=sources,
        depends=[*headers, *CUDA.parent.glob("*.h")],
        libraries=["torch", "torch_cpu", "c10"],
    )
    torch.ops.load_library(library)
    return ctypes.CDLL(str(library))
