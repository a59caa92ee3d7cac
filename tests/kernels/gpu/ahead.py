# SPDX-License-Identifier: Apache-2.0
"""Kernels compiled for GPUs that are not there."""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


@dataclass(frozen=True)
class Compiled:
    """What a kernel takes of a GPU: bytes for a thread and for a program."""

    cubin: bytes
    registers: int
    spilled: int
    shared: int
    instructions: int


def compile_for(capability, kernel, arguments, warps=4, stages=3):
    """Compile a kernel ahead of time.

    Args:
        capability: 80 for sm_80 and so on.
        kernel: what ``triton.jit`` made.
        arguments: a type by name, as "*fp16" or "i32"; anything else is a constant. Pointers, and
            integers called "i32:16", are multiples of 16, as they are where they are launched.
    """
    types, constants, attributes = {}, {}, {}
    for place, name in enumerate(kernel.arg_names):
        given = arguments[name]
        if not isinstance(given, str):
            types[name], constants[name] = "constexpr", given
            continue
        types[name], _, divisor = given.partition(":")
        if divisor or given.startswith("*"):
            attributes[(place,)] = [["tt.divisibility", 16]]
    made = triton.compile(
        ASTSource(kernel, types, constants, attributes),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": warps, "num_stages": stages},
    )
    cubin = made.asm["cubin"]
    return Compiled(cubin, *_usage(cubin), made.metadata.shared, len(made.asm["sass"].splitlines()))


def _usage(cubin):
    """Registers and spilled bytes (the stack) of a thread."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        shown = subprocess.run(
            [CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", shown).groups()
    return int(registers), int(stack)
