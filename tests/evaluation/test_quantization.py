# SPDX-License-Identifier: Apache-2.0
"""Ways to quantize: ours is that of the pages, others are what their names say."""

import pytest
import torch

from entropykv_vllm.evaluation import quantization
from entropykv_vllm.evaluation.variants import (
    OURS,
    PER_TOKEN,
    VARIANTS,
    Side,
    Variant,
    hadamard,
    symmetric,
)
from entropykv_vllm.kernels.formats import dequantize, pack, unpack
from entropykv_vllm.plan.capacity import quantized_bytes


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def error(x: torch.Tensor, y: torch.Tensor) -> float:
    return float((x - y).norm() / x.norm())


@pytest.mark.parametrize("bits", [8, 4])
def test_ours_is_what_a_page_holds(bits):
    keys, values = normal(2, 128, 64), normal(2, 128, 64) + 3
    size = quantized_bytes(128, 64, bits)
    stored = unpack(pack(keys, values, bits, size), bits, 128, 64)
    ours = Variant(OURS, PER_TOKEN, bits)
    torch.testing.assert_close(ours.replace_old(keys, values, 0), stored, rtol=0, atol=0)
    assert ours.share(64) == size / (2 * 128 * 64 * 2)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_variants_come_near_and_leave_the_window(variant):
    keys, values = normal(1, 2, 200, 64), normal(1, 2, 200, 64)
    for x, y in zip((keys, values), variant.replace_old(keys, values, 40), strict=True):
        assert torch.equal(x[..., 160:, :], y[..., 160:, :])
        assert 0 < error(x, y) < (0.01 if variant.bits == 8 else 0.2)


def test_bytes_of_scales_and_zeros():
    assert Variant(PER_TOKEN, PER_TOKEN).share(64) == 0.25 + 4 / 128
    assert Side("token", symmetric=True).floats(64) == 1
    assert Side("token", 32).floats(64) == 4
    assert Side("channel", 32).floats(64) == 4
    assert Side("channel", 128, rotated=True).floats(64) == 1


def test_a_large_channel_harms_tokens_but_not_channels():
    keys = normal(1, 128, 64)
    keys[..., 31] += 200
    others = [channel for channel in range(64) if channel != 31]
    errors = [
        error(keys[..., others], side.roundtrip(keys, 4)[..., others])
        for side in (OURS, Side("token", rotated=True), PER_TOKEN)
    ]
    assert errors[0] < 0.15 < 0.5 < errors[1] < errors[2]


def test_symmetric_codes_have_no_zero():
    x = torch.tensor([[-7.0, 3.5, 1.0], [0.0, 0.0, 0.0]])
    codes, scale, zero = symmetric(x, 4, -1)
    assert codes.tolist() == [[-7, 4, 1], [0, 0, 0]]
    assert scale.flatten().tolist() == [1, 0]
    assert not zero.any()
    assert dequantize(codes, scale, zero)[0].tolist() == [-7, 4, 1]


def test_rotations_keep_lengths_and_are_their_own_inverse():
    turn = hadamard(64)
    torch.testing.assert_close(turn @ turn, torch.eye(64))
    with pytest.raises(ValueError, match="48"):
        hadamard(48)


def test_names_and_rows():
    assert str(OURS) == "per channel, groups of 64 tokens"
    assert str(Side("token", 32, True, True)) == (
        "rotated, per token, groups of 32 channels, symmetric"
    )
    texts = [{"kl": [0.5], "top1": [1.0]}]
    (row,) = quantization.rows([quantization.result(Variant(OURS, PER_TOKEN), texts, 64)])
    assert row[2:] == ["4", "0.281", "0.500 (0.500-0.500)", "100 (100-100)"]
