# SPDX-License-Identifier: Apache-2.0
"""Where a hot page keeps a token's channels."""

import pytest
import torch

from entropykv_vllm.kernels.layout import read_pages, write_pages, write_tokens

BLOCKS, HEADS = 6, 2
PAGES = torch.tensor([4, 1, 3])

everywhere = pytest.mark.parametrize(
    ("dtype", "head_size", "block_size"),
    [
        (dtype, head_size, block_size)
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
        for head_size in (16, 64, 80)
        for block_size in (16, 32, 48)
    ],
)


def draw(dtype, head_size, block_size):
    """Keys and values of the pages, and an empty cache."""
    torch.manual_seed(0)
    shape = len(PAGES), HEADS, block_size, head_size
    cache = torch.zeros(BLOCKS, HEADS, block_size, 2 * head_size, dtype=dtype)
    return torch.randn(shape).to(dtype), torch.randn(shape).to(dtype), cache


@everywhere
def test_each_number_lies_where_the_layout_says(dtype, head_size, block_size):
    keys, values, cache = draw(dtype, head_size, block_size)
    write_pages(cache, PAGES, keys, values)
    p = 4 // cache.element_size()
    for page, head, t, d in [(0, 0, 0, 0), (1, 1, block_size - 1, head_size - 1), (2, 0, 13, 7)]:
        flat = cache[PAGES[page], head].flatten()
        k = ((t // 16) * (head_size // p) + d // p) * 16 * p + t % 16 * p + d % p
        v = ((d // 16) * (block_size // p) + t // p) * 16 * p + d % 16 * p + t % p
        assert flat[k] == keys[page, head, t, d]
        assert flat[block_size * head_size + v] == values[page, head, t, d]


@everywhere
def test_what_was_written_is_read_and_other_pages_stay(dtype, head_size, block_size):
    keys, values, cache = draw(dtype, head_size, block_size)
    write_pages(cache, PAGES, keys, values)
    read_keys, read_values = read_pages(cache, PAGES)
    assert torch.equal(read_keys, keys)
    assert torch.equal(read_values, values)
    assert not cache[[0, 2, 5]].any()


@everywhere
def test_tokens_one_by_one_give_the_same_pages(dtype, head_size, block_size):
    keys, values, cache = draw(dtype, head_size, block_size)
    whole = cache.clone()
    write_pages(whole, PAGES, keys, values)
    slots = (PAGES[:, None] * block_size + torch.arange(block_size)).flatten()
    tokens = (side.transpose(1, 2).flatten(0, 1) for side in (keys, values))
    write_tokens(cache, slots, *tokens)
    assert torch.equal(cache, whole)


def test_pages_of_any_leading_shape_in_a_strided_cache():
    """A cache may be a slice of a tensor that several layers share."""
    keys, values, cache = draw(torch.bfloat16, 64, 32)
    shared = torch.stack([cache, cache], dim=1)
    grid = PAGES[:2].view(2, 1)
    write_pages(shared[:, 1], grid, keys[:2, None], values[:2, None])
    assert not shared[:, 0].any()
    read_keys, read_values = read_pages(shared[:, 1], grid)
    assert torch.equal(read_keys, keys[:2, None])
    assert torch.equal(read_values, values[:2, None])


def test_what_cannot_be_read_is_refused():
    page = torch.tensor([1])
    for dtype in (torch.uint8, torch.float8_e4m3fn):
        with pytest.raises(ValueError, match="only 16 and 32 bit floats"):
            read_pages(torch.zeros(2, 1, 32, 128).to(dtype), page)
    for shape in ((2, 1, 24, 128), (2, 1, 32, 80)):
        with pytest.raises(ValueError, match="are not whole tiles of 16"):
            read_pages(torch.zeros(shape), page)
