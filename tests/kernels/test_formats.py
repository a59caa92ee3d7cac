# SPDX-License-Identifier: Apache-2.0
"""Cold pages against an oracle that places element by element, and what quantization promises."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from entropykv_vllm.kernels import formats
from entropykv_vllm.kernels.formats import dequantize, pack, quantize, unpack
from entropykv_vllm.plan.capacity import capacity, head_bytes, quantized_bytes

MAX = 65504.0
STEPS = {4: 15, 8: 254}
KINDS = ["normal", "biased", "constant", "huge", "tiny", "broken", "ends"]

head_sizes = st.sampled_from(range(32, 257, 16))
bits_of_codes = st.sampled_from([4, 8])
seeds = st.integers(0, 2**31)


def draw_floats(shape, kind, seed):
    """float32 numbers of one kind; "broken" ones have NaN and infinities among them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    if kind == "broken":
        bad = torch.tensor([math.nan, math.inf, -math.inf, 1e30, -0.0])
        chosen = bad[torch.randint(len(bad), shape, generator=generator)]
        return torch.where(x > 1, chosen, x)
    if kind == "ends":
        return x.sign() * MAX
    scale, bias = {
        "normal": (1.0, 0.0),
        "biased": (1.0, 300.0),
        "constant": (0.0, 0.3),
        "huge": (1e5, 0.0),
        "tiny": (1e-7, 0.0),
    }[kind]
    return x * scale + bias


def sane(x):
    """What of ``x`` a page is to hold."""
    return x.nan_to_num(0.0, MAX, -MAX).clamp(-MAX, MAX)


@st.composite
def pages(draw, lengths=(16, 32, 48, 128)):
    """Keys and values ``[tokens, head_size]`` that fill a page, its bits and its bytes."""
    head_size, bits = draw(head_sizes), draw(bits_of_codes)
    page, item = draw(st.sampled_from(lengths)), draw(st.sampled_from([2, 4]))
    tokens = capacity(head_size, page, item, bits)
    kind, seed = draw(st.sampled_from(KINDS)), draw(seeds)
    keys, values = draw_floats((2, tokens, head_size), kind, seed)
    return keys, values, bits, head_bytes(head_size, page, item)


# The oracle. Everything below is written from the description of the format alone.


def slow_half(x, towards):
    """fp16 of float32 ``x``, rounded to nearest (0), up (1) or down (-1)."""
    near = np.float16(x)
    if towards * (np.float64(x) - np.float64(near)) > 0:
        near = np.nextafter(near, np.float16(towards * np.inf))
    return near


def slow_quantize(x, bits):
    """Codes, scale and zero of one group, a list of float32."""
    x = [np.float32(0) if np.isnan(v) else np.clip(v, -MAX, MAX).astype(np.float32) for v in x]
    low, high = min(x), max(x)
    if bits == 4:
        zero = slow_half(low, -1)
        scale = slow_half((high - np.float32(zero)) / np.float32(15), 1)
        first, last = 0, 15
    else:
        zero = slow_half((low + high) / np.float32(2), 0)
        reach = max(high - np.float32(zero), np.float32(zero) - low)
        scale = slow_half(reach / np.float32(127), 1)
        first, last = -127, 127
    if scale == 0:
        return [0] * len(x), scale, zero
    steps = [np.rint((v - np.float32(zero)) / np.float32(scale)) for v in x]
    return [int(min(max(n, first), last)) for n in steps], scale, zero


def slow_place(data, start, block, column, row, code, bits):
    """Put one code into block number ``block`` of a region."""
    k, word = row % 8 // 2, 2 * (column % 16) + row % 2
    if bits == 4:
        data[start + block * 64 + 2 * word + k // 2] |= code << 4 * (k % 2)
    else:
        at = (k // 2) * 64 + (word // 8) * 16 + (k % 2) * 8 + word % 8
        data[start + block * 128 + at] = abs(code) | (0x80 if code < 0 else 0)


def slow_pack(keys, values, bits):
    """The bytes of one head of a page, without the unused rest."""
    tokens, dim = keys.shape
    codes, groups = tokens * dim * bits // 8, -(-tokens // 64)
    data = bytearray(2 * codes)
    scales, zeros = np.zeros((2, groups, dim), np.float16)
    for group in range(groups):
        for d in range(dim):
            rows = range(64 * group, min(64 * group + 64, tokens))
            found, scales[group, d], zeros[group, d] = slow_quantize(keys[rows, d], bits)
            for t, code in zip(rows, found, strict=True):
                slow_place(data, 0, t // 16 * (dim // 8) + d // 8, t, d, code, bits)
    data += scales.tobytes() + zeros.tobytes()
    scales, zeros = np.zeros((2, tokens), np.float16)
    for t in range(tokens):
        found, scales[t], zeros[t] = slow_quantize(values[t], bits)
        for d, code in enumerate(found):
            slow_place(data, codes, d // 16 * (tokens // 8) + t // 8, d, t, code, bits)
    return bytes(data + scales.tobytes() + zeros.tobytes())


def without_signs_of_zeros(data, codes):
    """The floats behind the codes with -0 as 0: which of two zeros is lower is left open."""
    floats = np.frombuffer(data[codes:], np.float16)
    return data[:codes] + (floats + np.float16(0)).tobytes()


@settings(deadline=None, max_examples=25)
@given(pages(lengths=(16, 32)))
def test_bytes_are_those_of_the_description(case):
    keys, values, bits, room = case
    used = quantized_bytes(*keys.shape, bits)
    packed = pack(keys, values, bits, room)
    assert packed.shape == (room,)
    assert not packed[used:].any()
    with np.errstate(all="ignore"):
        expected = slow_pack(keys.numpy(), values.numpy(), bits)
    codes = 2 * keys.numel() * bits // 8
    ours = without_signs_of_zeros(packed[:used].numpy().tobytes(), codes)
    assert ours == without_signs_of_zeros(expected, codes)


@settings(deadline=None)
@given(pages())
def test_pages_are_read_as_they_were_quantized(case):
    keys, values, bits, room = case
    read_keys, read_values = unpack(pack(keys, values, bits, room), bits, *keys.shape)
    groups = [dequantize(*quantize(group, bits, -2)) for group in keys.split(64, -2)]
    assert torch.equal(read_keys, torch.cat(groups, -2))
    assert torch.equal(read_values, dequantize(*quantize(values, bits, -1)))


@settings(deadline=None, max_examples=200)
@given(bits_of_codes, st.integers(1, 64), st.sampled_from(KINDS), seeds)
def test_no_number_moves_by_more_than_half_a_step(bits, length, kind, seed):
    x = draw_floats((20, length), kind, seed)
    codes, scale, zero = quantize(x, bits, -1)
    assert scale.isfinite().all()
    assert zero.isfinite().all()
    assert codes.min() >= (0 if bits == 4 else -127)
    assert codes.max() <= (15 if bits == 4 else 127)
    error = (dequantize(codes, scale, zero) - sane(x)).abs()
    # The last term is float32's rounding of a number far from zero.
    bound = scale.float() / 2 * (1 + 1e-4) + sane(x).abs() * 2.0**-23
    assert (error <= bound).all()


@settings(deadline=None)
@given(bits_of_codes, st.floats(-60000, 60000, width=32), st.floats(0, 5000, width=32), seeds)
def test_steps_are_no_longer_than_the_range_asks(bits, bias, spread, seed):
    """A bias costs no more than fp16's distance of two numbers there."""
    x = bias + spread * (torch.rand(4, 64, generator=torch.Generator().manual_seed(seed)) - 0.5)
    _, scale, _ = quantize(x, bits, -1)
    reach = x.amax(-1) - x.amin(-1)
    apart = float(np.spacing(np.float16(abs(bias) + spread / 2)))
    assert (scale[:, 0].float() <= (reach + apart) / STEPS[bits] * (1 + 2e-3) + 1e-7).all()


@pytest.mark.parametrize("bits", [4, 8])
def test_a_channel_far_from_zero_keeps_its_range(bits):
    """As some channels of keys are: the zero and the group take the bias away."""
    keys = 300 + 4 * torch.rand(64, 32) - 2
    values = torch.randn(64, 32)
    read, _ = unpack(pack(keys, values, bits, 1 << 20), bits, 64, 32)
    assert (read - keys).abs().max() <= 4 / STEPS[bits]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("constant", [0.0, 0.3, -0.3, 1e-9, -1e-9, 1e-40, MAX, -MAX, 1e38, -1e38])
def test_equal_numbers_stay_equal(bits, constant):
    x = torch.full((1, 64), constant)
    read = dequantize(*quantize(x, bits, -1))
    assert len(read.unique()) == 1
    assert (read - sane(x)).abs().max() <= abs(float(sane(x)[0, 0])) * 1e-3 / STEPS[bits] + 3e-8


@pytest.mark.parametrize("bits", [4, 8])
def test_numbers_that_fp16_holds_are_exact_where_they_are_alone(bits):
    for x in (0.5, -3.0, 2.0**-24, MAX, -MAX):
        assert (dequantize(*quantize(torch.full((16,), x), bits, 0)) == x).all()


@settings(deadline=None)
@given(st.lists(st.floats(-MAX, MAX, width=32), min_size=1, max_size=50))
def test_directed_rounding_finds_the_neighbours(numbers):
    x = torch.tensor(numbers)
    low, high = formats.round_down(x), formats.round_up(x)
    assert (low.float() <= x).all()
    assert (high.float() >= x).all()
    with np.errstate(over="ignore"):
        after = np.nextafter(low.numpy(), np.float16(np.inf)).astype(np.float32)
    assert (after > x.numpy()).all()
    assert torch.equal(formats.round_down(-x), -high)


def test_directed_rounding_of_every_fp16_number_is_itself():
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.float16)
    x = x[x.isfinite()]
    assert torch.equal(formats.round_down(x.float()), x)
    assert torch.equal(formats.round_up(x.float()), x)


@pytest.mark.parametrize("bits", [4, 8, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_pages_of_a_cache(bits, dtype):
    """A cache may be a slice of a tensor that several layers share; other pages are left alone."""
    shared = torch.full((7, 2, 3, 32, 160), torch.nan, dtype=dtype)
    cache, grid = shared[:, 1], torch.tensor([[5, 1], [2, 6]])
    tokens = formats.cold_capacity(cache, bits)
    keys, values = torch.randn(2, 2, 2, 3, tokens, 80).to(dtype)
    formats.write_cold(cache, grid, keys, values, bits)
    assert shared[:, 0].isnan().all()
    assert cache[[0, 3, 4]].isnan().all()
    for read, old in zip(formats.read_cold(cache, grid, bits), (keys, values), strict=True):
        assert read.shape == old.shape
        assert (read.float() - old.float()).abs().max() < {4: 0.4, 8: 0.03, 16: 1e-9}[bits]
    empty = formats.read_cold(cache, grid[:0], bits)[0]
    assert empty.shape == (0, 2, 3, tokens, 80)


def test_batches_are_packed_as_their_parts():
    keys, values = torch.randn(2, 3, 2, 48, 32)
    together = pack(keys, values, 4, 4096)
    assert together.shape == (3, 2, 4096)
    for i in range(3):
        assert torch.equal(together[i, 1], pack(keys[i, 1], values[i, 1], 4, 4096))


def test_what_cannot_be_packed_is_refused():
    cache, page = torch.zeros(3, 1, 32, 64), torch.tensor([1])
    with pytest.raises(ValueError, match="bits must be 16, 8 or 4, not 2"):
        formats.read_cold(cache, page, 2)
    with pytest.raises(ValueError, match="holds 32 tokens, not 16"):
        formats.write_cold(cache, page, *torch.zeros(2, 1, 1, 16, 32), bits=16)
    with pytest.raises(ValueError, match="do not fit 1000 bytes"):
        pack(*torch.zeros(2, 32, 32), bits=8, head_bytes=1000)
    with pytest.raises(ValueError, match="8 tokens of 32 channels"):
        pack(*torch.zeros(2, 8, 32), bits=8, head_bytes=1 << 20)
