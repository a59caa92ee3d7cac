# SPDX-License-Identifier: Apache-2.0
"""What must hold of the compiled kernels so that one build runs on every CPU."""

import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# What the compiler may call: the C library, conversions of 16-bit floats, thread-local variables.
LIBRARY = {"memcpy", "memset", "memmove", "__truncsfhf2", "__extendhfsf2"}
LIBRARY |= {"__tls_get_addr", "_GLOBAL_OFFSET_TABLE_"}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not shutil.which("g++"), reason="needs a compiler"),
    pytest.mark.skipif(not (ROOT / "csrc").is_dir(), reason="needs the sources"),
]


@pytest.fixture(scope="module")
def flags():
    """Compiler flags of each instruction set's source, as setup.py has them."""
    found = runpy.run_path(str(ROOT / "setup.py"), run_name="flags")
    return {Path(source).stem: found["FLAGS"] + more for source, more in found["ISA_FLAGS"].items()}


@pytest.fixture(scope="module")
def objects(flags, tmp_path_factory):
    folder = tmp_path_factory.mktemp("objects")
    made = {}
    for name, options in flags.items():
        made[name] = folder / f"{name}.o"
        source = ROOT / "csrc/cpu" / f"{name}.cpp"
        command = ["g++", *options, "-fPIC", "-fno-exceptions", "-fno-rtti", "-c", str(source)]
        subprocess.run([*command, "-o", str(made[name])], check=True)
    return made


def test_no_code_could_be_shared_between_instruction_sets(objects):
    """A weak symbol is one that the linker takes from whichever object it likes."""
    for name, path in objects.items():
        listing = subprocess.run(["nm", str(path)], capture_output=True, text=True, check=True)
        symbols = [line.split()[-2:] for line in listing.stdout.splitlines()]
        assert not [s for kind, s in symbols if kind in "wWvVu"], name
        tables = [s for kind, s in symbols if kind in "DRB" and kind.isupper()]
        assert len(tables) == 1, (name, tables)
        needed = {s for kind, s in symbols if kind == "U"}
        assert needed <= LIBRARY, name


def test_the_generic_code_has_no_newer_instructions(objects):
    listing = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", str(objects["isa_generic"])],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    # Instructions with three operands (VEX) begin with v, wide registers are ymm and zmm.
    assert not re.findall(r"\t(v\w+)\s|%[yz]mm", listing)
    assert "mulps" in listing


def test_the_operators_load_without_anything_else_of_the_package():
    code = "import torch, entropykv_vllm._C; print(torch.ops.entropykv.capacity(64, 32, 2, 4))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "112"
