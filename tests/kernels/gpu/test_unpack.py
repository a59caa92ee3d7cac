# SPDX-License-Identifier: Apache-2.0
"""What only a GPU runs of unpacking: its instructions, carried out here one by one."""

import re

import pytest
import torch

tl = pytest.importorskip("triton.language")
instructions = pytest.importorskip("entropykv_vllm.kernels.gpu.unpack").instructions

MASK = 2**32 - 1


def permute(a, b, selector):
    """PTX's prmt: four bytes, each one of the eight of ``a`` and ``b``."""
    both = a | b << 32
    return sum((both >> 8 * (selector >> 4 * i & 15) & 255) << 8 * i for i in range(4))


def look_up(a, b, c, table):
    """PTX's lop3: any function of three bits, as a table."""
    bits = ((a >> i & 1) << 2 | (b >> i & 1) << 1 | (c >> i & 1) for i in range(32))
    return sum((table >> bit & 1) << i for i, bit in enumerate(bits))


PTX = {
    "shl.b32": lambda a, n: a << n & MASK,
    "shr.u32": lambda a, n: a >> n,
    "lop3.b32": look_up,
    "prmt.b32": permute,
}


def carry_out(text, word):
    """The registers $0 to $3 after ``text`` with ``word`` in $4."""
    registers = {"$4": word}
    for line in text.splitlines()[2:-1]:
        name, to, *given = re.split(r",? +", line.strip().rstrip(";"))
        values = [registers[x] if x in registers else int(x, 0) for x in given]
        registers[to] = PTX[name](*values)
    return [registers[f"${i}"] for i in range(4)]


@pytest.mark.parametrize(
    ("kind", "dtype", "base"),
    [(tl.float16, torch.float16, 64), (tl.bfloat16, torch.bfloat16, 16)],
)
def test_instructions(kind, dtype, base):
    """All bytes in all four places: base + low half, then base + high half, in order."""
    for first in range(256):
        stored = [(first + 67 * i) % 256 for i in range(4)]
        word = sum(byte << 8 * i for i, byte in enumerate(stored))
        found = carry_out(instructions(kind), word)
        numbers = torch.tensor(found).to(torch.uint32).view(dtype).float() - base
        assert numbers.tolist() == [x & 15 for x in stored] + [x >> 4 for x in stored]
