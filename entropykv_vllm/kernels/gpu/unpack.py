# SPDX-License-Identifier: Apache-2.0
"""Codes of 4 bits as floats of 16, without a conversion.

The bits of a code are put into the mantissa of a power of two, BASE, whose neighbours are 1 apart
there: ``BASE + code``. In float16 BASE is 64 and the code takes bits 4 to 7; in bfloat16 it is 16
and bits 3 to 6. So a code needs one byte, and the other byte is the same for all.

A GPU does four bytes at a time, eight instructions for eight codes (`instructions`). The compiler
does not find that: its code for one byte at a time is twice as long. Where the factors of products
are float32 (the interpreter, caches of float32), `plain` does the same byte by byte.
"""

import triton
import triton.language as tl


def instructions(kind: tl.dtype) -> str:
    """PTX that makes of four bytes the floats of their low halves, and those of their high ones.

    The floats of bytes 0 and 1 go to $0, of 2 and 3 to $1; of the high halves to $2 and $3.
    """
    left, right, mask, low_byte, high_byte = (
        (4, 0, 0xF0F0F0F0, 0, 0x54) if kind == tl.float16 else (3, 1, 0x78787878, 0x80808080, 0x41)
    )
    # 0xEA: (a & b) | c. The selectors take bytes 0 and 1, or 2 and 3, each below byte 4.
    return f"""{{
        .reg .b32 low, high;
        shl.b32 low, $4, {left};
        shr.u32 high, $4, {right};
        lop3.b32 low, low, {mask:#x}, {low_byte:#x}, 0xea;
        lop3.b32 high, high, {mask:#x}, {low_byte:#x}, 0xea;
        prmt.b32 $0, low, {high_byte:#x}, 0x4140;
        prmt.b32 $1, low, {high_byte:#x}, 0x4342;
        prmt.b32 $2, high, {high_byte:#x}, 0x4140;
        prmt.b32 $3, high, {high_byte:#x}, 0x4342;
    }}"""


FLOAT16 = tl.constexpr(instructions(tl.float16))
BFLOAT16 = tl.constexpr(instructions(tl.bfloat16))

REGISTERS = tl.constexpr("=r,=r,=r,=r,r")


@triton.jit
def base_of(BITS: tl.constexpr, KIND: tl.constexpr):
    """What `halves` adds to codes of a cache of this kind."""
    if BITS == 8 or KIND.is_fp32():
        return 0.0
    elif KIND.is_fp16():
        return 64.0
    else:
        return 16.0


@triton.jit
def plain(nibble, KIND: tl.constexpr):
    """The float of bytes that have the code in their high half and zeros in the low one."""
    if KIND.is_fp32():
        return (nibble >> 4).to(tl.float32)
    elif KIND.is_fp16():
        return (nibble.to(tl.uint16) | 0x5400).to(tl.float16, bitcast=True)
    else:
        return ((nibble >> 1).to(tl.uint16) | 0x4180).to(tl.bfloat16, bitcast=True)


@triton.jit
def halves(both, KIND: tl.constexpr, DOT: tl.constexpr):
    """``BASE + code`` of the low and of the high half of bytes, as DOT.

    Args:
        both: uint8, any shape.
        KIND: the cache's type, which says what BASE is.
        DOT: the type of the factors of products.
    """
    if DOT.is_fp32():
        low, high = plain(both << 4, KIND).to(DOT), plain(both & 0xF0, KIND).to(DOT)
    elif KIND.is_fp16():
        low, high = tl.inline_asm_elementwise(
            FLOAT16, REGISTERS, [both], dtype=(tl.float16, tl.float16), is_pure=True, pack=4
        )
    else:
        low, high = tl.inline_asm_elementwise(
            BFLOAT16, REGISTERS, [both], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    return low, high
