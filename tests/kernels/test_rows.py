# SPDX-License-Identifier: Apache-2.0
"""Pages in the order of rows, as GPUs have them, and the reference over them."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from entropykv_vllm.kernels import reference
from entropykv_vllm.kernels.formats import (
    cold_capacity,
    pack,
    page_bytes,
    quantize,
    read_cold,
    unpack,
    write_cold,
)
from entropykv_vllm.kernels.layout import read_pages, write_pages
from tests.kernels.paged import DTYPES, HEAD_SIZES, PAGES, batches, new_cache, seeds

slow = settings(deadline=None, max_examples=40)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_hot_page_has_each_tokens_key_and_then_its_value(dtype):
    cache = torch.zeros(5, 2, 32, 2 * 48, dtype=dtype)
    keys, values = torch.randn(2, 2, 2, 32, 48).to(dtype)
    write_pages(cache, torch.tensor([3, 1]), keys, values, "rows")
    for i, page in enumerate([3, 1]):
        assert torch.equal(cache[page], torch.cat([keys[i], values[i]], -1))
    assert not cache[[0, 2, 4]].any()


@pytest.mark.parametrize("bits", [8, 4])
def test_codes_lie_token_after_token(bits):
    tokens, head_size = 80, 32
    keys, values = torch.randn(2, tokens, head_size)
    packed = pack(keys, values, bits, 1 << 14, "rows")
    width = head_size * bits // 8
    key_codes = torch.cat([quantize(part, bits, -2)[0] for part in keys.split(64)])
    value_codes = quantize(values, bits, -1)[0]
    for region, codes in enumerate([key_codes, value_codes]):
        for token, channel in [(0, 0), (3, 15), (63, 16), (64, 31), (79, 7)]:
            at = (region * tokens + token) * width
            if bits == 8:
                found = int(packed[at + channel].view(torch.int8))
            else:
                half, place = divmod(channel, head_size // 2)
                found = int(packed[at + place]) >> 4 * half & 15
            assert found == int(codes[token, channel])


@slow
@given(st.sampled_from([8, 4]), st.integers(1, 9), st.sampled_from(HEAD_SIZES), seeds)
def test_the_order_changes_no_number(bits, tiles, head_size, seed):
    torch.manual_seed(seed)
    keys, values = torch.randn(2, 3, 16 * tiles, head_size)
    orders = ("tiles", "rows")
    packed = [pack(keys, values, bits, 1 << 18, order) for order in orders]
    assert not torch.equal(*packed)
    found = [
        unpack(x, bits, 16 * tiles, head_size, order)
        for x, order in zip(packed, orders, strict=True)
    ]
    for tiled, rows in zip(*found, strict=True):
        assert torch.equal(tiled, rows)


def in_tiles(cache, bits, hot, cold):
    """A cache in rows, with some of its pages in tiles."""
    made = cache.clone()
    write_pages(made, hot, *read_pages(cache, hot, "rows"))
    write_cold(made, cold, *read_cold(cache, cold, bits, "rows"), bits)
    return made


@slow
@given(batches(order="rows"))
def test_attention_over_rows_is_that_over_tiles(batch):
    page = batch.cache.shape[2]
    held = list(zip(batch.table.long(), batch.cold.tolist(), batch.hot.tolist(), strict=True))
    cold = torch.cat([row[:old] for row, old, _ in held])
    hot = torch.cat([row[old : old - (-new // page)] for row, old, new in held])
    tiled = replace(batch, cache=in_tiles(batch.cache, batch.bits, hot, cold), order="tiles")

    def over_rows(*arguments):
        reference.attention(*arguments, order="rows")

    # Quantizing what was quantized moves numbers by as much as a rounding.
    error = (batch.run(over_rows).float() - tiled.run(reference.attention).float()).abs()
    assert not error.numel() or error.max() <= 2e-2 * batch.largest_value()


@slow
@given(st.sampled_from(DTYPES), st.sampled_from(PAGES[1:]), st.sampled_from([16, 8, 4]), st.data())
def test_collapse_of_rows_is_that_of_tiles(dtype, page, bits, data):
    """The same tokens stay, in the same codes; a drop then keeps the same pages."""
    torch.manual_seed(data.draw(seeds))
    cache = new_cache(24, 2, page, 64, dtype, "noise", False)
    target = cold_capacity(cache, bits)
    count = -(-3 * target // page)
    pages = torch.randperm(24)[:count]
    keys, values = torch.randn(2, count, 2, page, 64).to(dtype)
    found = []
    for order in ("tiles", "rows"):
        made = cache.clone()
        write_pages(made, pages, keys, values, order)
        src, dst, sinks = pages[None], pages[None, :2], torch.tensor([3])
        choice = ("entropykv", "token", "head")
        reference.collapse(made, src, dst, sinks, *choice, 16, bits, order=order)
        reference.drop(made, dst, dst[:, :1], sinks * 0, "norm", bits, order=order)
        found.append(read_cold(made, pages[:2], bits, order))
        assert not torch.equal(page_bytes(made), page_bytes(cache))
    for tiled, rows in zip(*found, strict=True):
        assert torch.equal(tiled, rows)
