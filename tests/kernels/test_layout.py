# SPDX-License-Identifier: Apache-2.0
"""Our reading and writing of pages against vLLM's own."""

import pytest
import torch

from entropykv_vllm.kernels.layout import read_pages, write_pages

BLOCKS, HEADS = 6, 2
PAGES = torch.tensor([4, 1, 3])
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}

everywhere = pytest.mark.parametrize(
    ("isa", "dtype", "head_size", "block_size"),
    [
        (isa, dtype, head_size, block_size)
        for isa in ("vec", "vec16", "amx")
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
        for head_size in (64, 80, 128)
        for block_size in (32, 128)
    ],
)


def draw(dtype, head_size, block_size):
    """Keys and values of the pages, and an empty cache."""
    torch.manual_seed(0)
    shape = len(PAGES), HEADS, block_size, head_size
    cache = torch.zeros(BLOCKS, HEADS, block_size, 2 * head_size, dtype=dtype)
    return torch.randn(shape).to(dtype), torch.randn(shape).to(dtype), cache


def vllm_write(kernels, cache, keys, values, isa):
    """Through vLLM's op, token by token; skips where this machine's op refuses the isa."""
    block_size = cache.shape[2]
    slots = (PAGES[:, None] * block_size + torch.arange(block_size)).flatten()
    tokens = (side.transpose(1, 2).flatten(0, 1).contiguous() for side in (keys, values))
    try:
        kernels.write(cache, *tokens, slots, isa)
    except RuntimeError as error:
        pytest.skip(f"vLLM refuses: {error}")


@everywhere
def test_read_what_vllm_wrote(cpu_kernels, isa, dtype, head_size, block_size):
    keys, values, cache = draw(dtype, head_size, block_size)
    vllm_write(cpu_kernels, cache, keys, values, isa)
    read_keys, read_values = read_pages(cache, PAGES, isa)
    assert torch.equal(read_keys, keys)
    assert torch.equal(read_values, values)


@everywhere
def test_write_what_vllm_would_have_written(cpu_kernels, isa, dtype, head_size, block_size):
    keys, values, cache = draw(dtype, head_size, block_size)
    ours = cache.clone()
    vllm_write(cpu_kernels, cache, keys, values, isa)
    write_pages(ours, PAGES, keys, values, isa)
    assert torch.equal(ours, cache), "bytes differ, or a page that was not named was written"


@everywhere
def test_attention_over_written_pages(
    cpu_kernels, plain_attention, isa, dtype, head_size, block_size
):
    if isa == "amx" and (dtype != torch.bfloat16 or head_size % 32):
        pytest.skip("vLLM takes AMX for bfloat16 and head sizes that 32 divides only")
    if isa == "amx" and not torch.cpu._is_amx_tile_supported():
        pytest.skip("vLLM's AMX attention is an illegal instruction without AMX")
    keys, values, cache = draw(dtype, head_size, block_size)
    # The other pages hold NaN: none of them may be read.
    cache.fill_(torch.nan)
    write_pages(cache, PAGES, keys, values, isa)
    tokens = len(PAGES) * block_size - 5
    query = torch.randn(7, 3 * HEADS, head_size).to(dtype)
    table = PAGES[None].to(torch.int32)
    seq_lens = torch.tensor([tokens], dtype=torch.int32)

    output = cpu_kernels.attend(query, cache, table, seq_lens, [7], isa, 0.1)
    flat = (side.transpose(0, 1).flatten(1, 2)[:, :tokens] for side in (keys, values))
    expected = plain_attention(query, *flat, 0.1)
    torch.testing.assert_close(
        output.float(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
    )


@pytest.mark.parametrize("isa", ["vec", "amx"])
def test_pages_of_any_leading_shape_in_a_strided_cache(isa):
    """A cache may be a slice of a tensor that several layers share."""
    keys, values, cache = draw(torch.bfloat16, 64, 32)
    shared = torch.stack([cache, cache], dim=1)
    grid = PAGES[:2].view(2, 1)
    write_pages(shared[:, 1], grid, keys[:2, None], values[:2, None], isa)
    assert not shared[:, 0].any()
    read_keys, read_values = read_pages(shared[:, 1], grid, isa)
    assert torch.equal(read_keys, keys[:2, None])
    assert torch.equal(read_values, values[:2, None])


def test_what_cannot_be_read_is_refused():
    cache = torch.zeros(2, 1, 32, 128)
    page = torch.tensor([1])
    with pytest.raises(ValueError, match="'neon' is not one of entropykv, amx, vec, vec16"):
        read_pages(cache, page, "neon")
    for dtype in (torch.uint8, torch.float8_e4m3fn):
        with pytest.raises(ValueError, match="only 16 and 32 bit floats"):
            read_pages(cache.to(dtype), page, "vec")
    with pytest.raises(ValueError, match="Pages of 16 tokens do not fit isa 'amx'"):
        read_pages(torch.zeros(2, 1, 16, 128, dtype=torch.bfloat16), page, "amx")
