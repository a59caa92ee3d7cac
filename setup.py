# SPDX-License-Identifier: Apache-2.0
"""Builds the kernels of `csrc/`, and adds `configs/` and `csrc/` to the package.

The rest is in pyproject.toml. In a wheel the data lie in the package's folder, as
`entropykv_vllm/configs` and `entropykv_vllm/csrc`; an editable install leaves them where they are.
"""

import os
import platform
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.modified import newer_group

DATA = {
    "configs": ("*.yaml", "*.yml", "*.json"),
    "csrc": ("*.cpp", "*.h", "*.hpp", "*.cu", "*.cuh"),
}

_AVX2 = ["-mavx2", "-mfma", "-mf16c"]
_AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mf16c"]
_AVX512_BF16 = [*_AVX512, "-mavx512vbmi", "-mavx512bf16"]

#: One source per instruction set, chosen from at run time.
ISA_FLAGS = {
    "csrc/cpu/isa_generic.cpp": [],
    "csrc/cpu/isa_avx2.cpp": _AVX2,
    "csrc/cpu/isa_avx512.cpp": _AVX512,
    "csrc/cpu/isa_avx512_bf16.cpp": _AVX512_BF16,
    "csrc/cpu/isa_amx.cpp": [*_AVX512_BF16, "-mamx-tile", "-mamx-bf16"],
    "csrc/cpu/isa_amx_emulated.cpp": _AVX512_BF16,
}
OTHER_SOURCES = ["csrc/cpu/dispatch.cpp", "csrc/ops.cpp"]

CUDA_SOURCES = [f"csrc/cuda/{name}.cu" for name in ("gather", "scores", "select", "pages")]
#: Compute capabilities; the last one also as PTX, for GPUs that are newer.
CUDA_ARCHS = "75,80,86,89,90"
NVCC_FLAGS = ["-std=c++17", "-O3", "-Xcompiler", "-fPIC,-fvisibility=hidden"]
# Blocks of 256 threads fit every GPU; with launch bounds instead, ptxas spills to fit one more.
NVCC_FLAGS += ["-maxrregcount=128"]

# The oldest torch, and the oldest Python, that a wheel runs with.
STABLE_ABI = [("TORCH_TARGET_VERSION", "0x020a000000000000"), ("Py_LIMITED_API", "0x030b0000")]
FLAGS = [
    "-std=c++17",
    "-O3",
    "-g0",
    "-fvisibility=hidden",
    "-Wall",
    "-Wno-psabi",
    "-Wno-unknown-pragmas",
]
# Sums keep the order they are written in; only a*b+c may become one instruction.
FLAGS += ["-ffp-contract=fast", "-fno-math-errno"]


def cuda_home() -> Path | None:
    """The CUDA toolkit's folder: of CUDA_HOME, else of the nvcc on the PATH.

    ENTROPYKV_CUDA=0 builds without it; 1 makes it an error that there is none.
    """
    wanted = os.environ.get("ENTROPYKV_CUDA", "")
    if wanted == "0":
        return None
    for nvcc in _nvccs():
        if (nvcc.parents[1] / "include/cuda_runtime.h").exists():
            return nvcc.parents[1]
    if wanted == "1":
        raise SystemExit(
            "ENTROPYKV_CUDA=1, but there is no CUDA toolkit: set CUDA_HOME to its folder"
        )
    return None


def _nvccs() -> Iterator[Path]:
    if home := os.environ.get("CUDA_HOME"):
        yield Path(home) / "bin/nvcc"
    if found := shutil.which("nvcc"):
        yield Path(found).resolve()
    yield Path("/usr/local/cuda/bin/nvcc").resolve()


def cuda_archs() -> list[str]:
    """nvcc's options for the GPUs of ENTROPYKV_CUDA_ARCHS, as "80,90"."""
    archs = os.environ.get("ENTROPYKV_CUDA_ARCHS", CUDA_ARCHS).split(",")
    options = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs]
    return [*options, f"-gencode=arch=compute_{archs[-1]},code=compute_{archs[-1]}"]


def kernels() -> list[Extension]:
    """The extension modules: for x86, and for GPUs where there is a toolkit."""
    found = [cpu_kernels()] if platform.machine() in ("x86_64", "AMD64") else []
    return [*found, cuda_kernels(home)] if (home := cuda_home()) else found


def cpu_kernels() -> Extension:
    """`entropykv_vllm._C`, the kernels of `csrc/cpu`."""
    return extension("entropykv_vllm._C", [*ISA_FLAGS, *OTHER_SOURCES])


def cuda_kernels(home: Path) -> Extension:
    """`entropykv_vllm._C_cuda`, those of `csrc/cuda`; CUDA's library is linked in."""
    made = extension("entropykv_vllm._C_cuda", [*CUDA_SOURCES, "csrc/cuda/ops.cpp"])
    made.library_dirs.append(str(home / "lib64"))
    made.libraries += ["cudart_static", "dl", "rt", "pthread"]
    # The one function of torch's CUDA part is found through libtorch, which nothing else needs.
    made.extra_link_args = ["-Wl,--no-as-needed", "-ltorch", "-Wl,--exclude-libs,ALL"]
    return made


def extension(name: str, sources: list[str]) -> Extension:
    """A module that needs nothing of torch but its stable ABI."""
    return Extension(
        name,
        sources,
        depends=[str(path) for kind in ("*.h", "*.cuh") for path in Path("csrc").rglob(kind)],
        libraries=["torch", "torch_cpu", "c10"],
        define_macros=STABLE_ABI,
        language="c++",
        py_limited_api=True,
    )


def torch_folders() -> tuple[list[str], list[str]]:
    """Where the torch that is installed has its headers, and its libraries."""
    try:
        import torch.utils.cpp_extension as torch_build
    except ModuleNotFoundError as error:
        raise SystemExit(
            f"the kernels are built with the torch that is installed, but {error}: install torch, "
            "then `pip install --no-build-isolation` or `python -m build --no-isolation`"
        ) from error
    return torch_build.include_paths(), torch_build.library_paths()


class BuildKernels(build_ext):
    """setuptools' `build_ext`, with flags per source and as many compilers as cores."""

    def build_extension(self, ext: Extension) -> None:
        """Compile the sources side by side, then let setuptools link the objects."""
        # Asked for here and not where the modules are named, so that an sdist needs no torch.
        headers, libraries = torch_folders()
        ext.include_dirs += headers
        ext.library_dirs += libraries
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(lambda source: self._compile(ext, source), ext.sources))
        ext.extra_objects = [*(ext.extra_objects or []), *objects]
        # Linked anew when an object is newer than the library: there are no sources to tell.
        ext.depends = [*ext.depends, *objects]
        ext.sources = []
        super().build_extension(ext)

    def _compile(self, ext: Extension, source: str) -> str:
        if source.endswith(".cu"):
            return self._compile_cuda(ext, source)
        flags = FLAGS + ISA_FLAGS.get(source, [])
        if source in ISA_FLAGS:
            # Nothing that a linker could merge with another instruction set's code.
            flags = [*flags, "-fno-exceptions", "-fno-rtti"]
        (made,) = self.compiler.compile(
            [source],
            output_dir=self.build_temp,
            macros=ext.define_macros,
            include_dirs=ext.include_dirs,
            extra_postargs=flags,
            depends=ext.depends,
        )
        return made

    def _compile_cuda(self, ext: Extension, source: str) -> str:
        made = Path(self.build_temp, source).with_suffix(".o")
        made.parent.mkdir(parents=True, exist_ok=True)
        if newer_group([source, *ext.depends], str(made)) or self.force:
            nvcc = str(cuda_home() / "bin/nvcc")
            self.spawn([nvcc, *NVCC_FLAGS, *cuda_archs(), "-c", source, "-o", str(made)])
        return str(made)


class BuildWithData(build_py):
    """setuptools' `build_py`, which also copies DATA."""

    def run(self) -> None:
        """Copies the package and then, unless the install is an editable one, the data."""
        super().run()
        if self.editable_mode:
            return
        for source, target in self._data():
            self.mkpath(str(target.parent))
            self.copy_file(str(source), str(target), preserve_mode=False)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        """The files that the build makes; bdist_wheel and install rely on it."""
        data = [] if self.editable_mode else [str(target) for _, target in self._data()]
        return super().get_outputs(include_bytecode) + data

    def _data(self) -> list[tuple[Path, Path]]:
        package = Path(self.build_lib) / "entropykv_vllm"
        return [
            (path, package / path)
            for folder, patterns in DATA.items()
            for pattern in patterns
            for path in sorted(Path(folder).rglob(pattern))
        ]


class AbiWheel(bdist_wheel):
    """One wheel for all Pythons from the oldest on."""

    def finalize_options(self) -> None:
        """Tag the wheel cp311-abi3 where it has kernels."""
        if self.distribution.ext_modules:
            self.py_limited_api = "cp311"
        super().finalize_options()


if __name__ == "__main__":
    setup(
        ext_modules=kernels(),
        cmdclass={
            "build_py": BuildWithData,
            "build_ext": BuildKernels,
            "bdist_wheel": AbiWheel,
        },
    )
