# SPDX-License-Identifier: Apache-2.0
"""Launches compiled for GPUs that are not there."""

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
}
OPTIONS = ("num_warps", "num_stages")


@dataclass(frozen=True)
class Compiled:
    """A kernel for a GPU, and what it takes of one.

    Attributes:
        registers: of a thread.
        stack: bytes of a thread; what does not fit the registers is spilled there.
        shared: bytes of a program.
    """

    cubin: bytes
    registers: int
    stack: int
    shared: int


class Recorder:
    """In place of a kernel's ``run``: keeps what it was launched with, and launches nothing."""

    def __init__(self, monkeypatch, kernel):
        self.kernel, self.launches, self.grids = kernel, [], []
        monkeypatch.setattr(kernel, "run", self._run)

    def _run(self, *args, grid, warmup, **kwargs):
        self.grids.append(grid)
        options = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
        self.launches.append(
            (dict(zip(self.kernel.arg_names, args, strict=False)) | kwargs, options)
        )

    def compile(self, capability, folder):
        """The last launch as Triton would compile it for ``sm_{capability}``.

        Args:
            folder: for the cubin.
        """
        arguments, options = self.launches[-1]
        types, constants, attributes = {}, {}, {}
        for place, parameter in enumerate(self.kernel.params):
            value = arguments[parameter.name]
            types[parameter.name], aligned = _type_of(value, parameter.is_constexpr)
            if types[parameter.name] == "constexpr":
                constants[parameter.name] = value
            elif aligned:
                attributes[(place,)] = [["tt.divisibility", 16]]
        source = ASTSource(self.kernel, types, constants, attributes)
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        cubin = made.asm["cubin"]
        return Compiled(cubin, *_usage(cubin, folder), made.metadata.shared)


def _type_of(value, constant):
    """Its name in a signature, and whether 16 is known to divide it (a pointer always: torch's)."""
    if constant or value is None or (isinstance(value, int) and value == 1):
        return "constexpr", False
    if isinstance(value, torch.Tensor):
        return POINTERS[value.dtype], True
    return ("i32", value % 16 == 0) if isinstance(value, int) else ("fp32", False)


def _usage(cubin, folder):
    """Registers and bytes of stack of a thread."""
    file = folder / "kernel.cubin"
    file.write_bytes(cubin)
    command = [CUOBJDUMP, "-res-usage", file]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", shown).groups()
    return int(registers), int(stack)
