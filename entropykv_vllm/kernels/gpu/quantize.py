# SPDX-License-Identifier: Apache-2.0
"""`kernels.formats.quantize` in Triton, to the bit: scales are rounded up, quotients exactly."""

import triton
import triton.language as tl


@triton.jit
def finite(x):
    """NaN as 0, and what float16 cannot hold as the nearest that it can."""
    return tl.minimum(tl.maximum(tl.where(x == x, x, 0.0), -65504.0), 65504.0)


@triton.jit
def round_down(x):
    """The largest float16 number that is not above ``x``."""
    near = x.to(tl.float16)
    bits = near.to(tl.int16, bitcast=True)
    # The next lower number: a smaller magnitude above zero, a larger one below.
    lower = (bits + tl.where(bits < 0, 1, -1)).to(tl.int16)
    return tl.where(near.to(tl.float32) > x, lower, bits).to(tl.float16, bitcast=True)


@triton.jit
def round_up(x):
    """The smallest float16 number that is not below ``x``."""
    return -round_down(-x)


@triton.jit
def range_of(low, high, BITS: tl.constexpr):
    """Scale and zero, float16, of groups with these ends."""
    if BITS == 4:
        zero = round_down(low)
        reach = high - zero.to(tl.float32)
    else:
        zero = ((low + high) * 0.5).to(tl.float16)
        reach = tl.maximum(high - zero.to(tl.float32), zero.to(tl.float32) - low)
    last = tl.full(reach.shape, 15.0 if BITS == 4 else 127.0, tl.float32)
    return round_up(tl.div_rn(reach, last)), zero


@triton.jit
def codes_of(x, scale, zero, BITS: tl.constexpr):
    """The codes of ``x``, int32; ``scale`` and ``zero`` have its shape or 1."""
    scale, zero = scale.to(tl.float32), zero.to(tl.float32)
    divisor = tl.where(scale > 0, scale, 1.0)
    steps = tl.div_rn(x - zero, tl.broadcast_to(divisor, x.shape))
    # Adding 1.5 * 2^23 leaves no bits for a fraction: to the nearest, of two the even one.
    steps = (steps + 12582912.0) - 12582912.0
    steps = tl.minimum(
        tl.maximum(steps, 0.0 if BITS == 4 else -127.0), 15.0 if BITS == 4 else 127.0
    )
    return tl.where(scale > 0, steps, 0.0).to(tl.int32)
