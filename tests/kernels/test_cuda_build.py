# SPDX-License-Identifier: Apache-2.0
"""What can be told of the compiled CUDA kernels without a GPU."""

import importlib.util
import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from entropykv_vllm.kernels import cuda

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not (ROOT / "csrc").is_dir(), reason="needs the sources")


@pytest.fixture(scope="module")
def setup():
    """The names of setup.py."""
    return runpy.run_path(str(ROOT / "setup.py"), run_name="names")


def usage(report):
    """Registers, and bytes of stack and spills, of each kernel in what ptxas says."""
    frame = r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
    found = re.findall(rf"{frame}\nptxas info\s+: Used (\d+) registers", report)
    return [(int(registers), sum(map(int, spilled))) for *spilled, registers in found]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gather", "scores", "select", "pages"])
@pytest.mark.parametrize("which", [0, -1], ids=["oldest", "newest"])
def test_no_kernel_keeps_numbers_on_a_stack(setup, name, which, tmp_path):
    """Nor does one need so many registers that a multiprocessor holds only one block of it."""
    home = setup["cuda_home"]()
    if home is None:
        pytest.skip("needs a CUDA toolkit")
    arch = setup["CUDA_ARCHS"].split(",")[which]
    command = [str(home / "bin/nvcc"), *setup["NVCC_FLAGS"], "-Werror=all-warnings"]
    command += [f"-arch=sm_{arch}", "-cubin", "-Xptxas=-v", "-o", str(tmp_path / "kernels")]
    done = subprocess.run(
        [*command, str(ROOT / f"csrc/cuda/{name}.cu")], capture_output=True, text=True
    )
    assert not done.returncode, done.stderr
    found = usage(done.stderr)
    print(f"sm_{arch} {name}: registers {[registers for registers, _ in found]}")
    assert len(found) == done.stderr.count("Compiling entry function") > 0
    assert not [spilled for _, spilled in found if spilled]
    assert max(registers for registers, _ in found) <= 128


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="needs a compiler")
@pytest.mark.parametrize("source", ["csrc/ops.cpp", "csrc/cuda/ops.cpp"])
def test_the_bindings_compile_against_torch(setup, source):
    """Another torch's than the one installed, if ENTROPYKV_TORCH_HEADERS is its include folder."""
    import torch.utils.cpp_extension as torch_build

    paths = torch_build.include_paths()
    if other := os.environ.get("ENTROPYKV_TORCH_HEADERS"):
        paths = [other, f"{other}/torch/csrc/api/include"]
    command = ["g++", *setup["FLAGS"], "-fsyntax-only", str(ROOT / source)]
    command += [f"-D{name}={value}" for name, value in setup["STABLE_ABI"]]
    command += [f"-isystem{path}" for path in (*paths, sysconfig.get_paths()["include"])]
    done = subprocess.run(command, capture_output=True, text=True)
    assert not done.returncode, done.stderr


def test_a_report_of_spills_is_understood():
    report = """ptxas info    : Function properties for kernel
    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers
"""
    assert usage(report) == [(255, 24)]


def test_every_source_is_built(setup):
    assert {Path(x) for x in setup["CUDA_SOURCES"]} == {
        path.relative_to(ROOT) for path in (ROOT / "csrc/cuda").glob("*.cu")
    }


def test_the_toolkit_can_be_left_out_or_demanded(setup, monkeypatch, tmp_path):
    monkeypatch.setenv("ENTROPYKV_CUDA", "0")
    assert setup["cuda_home"]() is None
    monkeypatch.setenv("ENTROPYKV_CUDA", "1")
    monkeypatch.setitem(setup["cuda_home"].__globals__, "_nvccs", lambda: [tmp_path / "bin/nvcc"])
    with pytest.raises(SystemExit, match="set CUDA_HOME to its folder"):
        setup["cuda_home"]()
    (tmp_path / "include").mkdir()
    (tmp_path / "include/cuda_runtime.h").touch()
    assert setup["cuda_home"]() == tmp_path


def test_the_architectures_can_be_chosen(setup, monkeypatch):
    monkeypatch.setenv("ENTROPYKV_CUDA_ARCHS", "80,100")
    assert setup["cuda_archs"]() == [
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_100,code=sm_100",
        "-gencode=arch=compute_100,code=compute_100",
    ]


LOADS = """
import torch
import entropykv_vllm._C, entropykv_vllm._C_cuda
zeros = torch.zeros(1, 1, 16)
try:
    torch.ops.entropykv.cuda_write(zeros, zeros, torch.zeros(2, 1, 16, 32), torch.tensor([0]))
except NotImplementedError as error:
    print(error)
"""


BUILT = importlib.util.find_spec("entropykv_vllm._C_cuda")
built = pytest.mark.skipif(not BUILT, reason="needs the CUDA kernels")


@built
def test_the_library_loads_where_torch_has_no_gpu():
    """Beside the one for CPUs; and says that its ops are for GPUs."""
    out = subprocess.run([sys.executable, "-c", LOADS], capture_output=True, text=True)
    assert not out.returncode, out.stderr
    assert (
        "Could not run 'entropykv::cuda_write' with arguments from the 'CPU' backend" in out.stdout
    )


@built
@pytest.mark.skipif(not shutil.which("readelf"), reason="needs readelf")
def test_torch_is_where_the_library_looks_for_the_stream():
    """Its CUDA part is loaded by libtorch; without that it is no error that there is none."""
    command = ["readelf", "--wide", "--dynamic", "--dyn-syms", BUILT.origin]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "[libtorch.so]" in listing
    (stream,) = re.findall(r".*aoti_torch_get_current_cuda_stream", listing)
    assert "WEAK" in stream
    assert "UND" in stream
    assert "libcudart" not in listing


def test_without_a_gpu_there_are_no_kernels(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert not cuda.load.__wrapped__()
