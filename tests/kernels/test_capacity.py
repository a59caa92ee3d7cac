# SPDX-License-Identifier: Apache-2.0
"""The capacity of a page: one rule, said in Python and in C++."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from entropykv_vllm.kernels import native
from entropykv_vllm.plan.capacity import LONGEST_UNIT, capacity, head_bytes, quantized_bytes

shapes = {
    "head_size": st.integers(2, 16).map(lambda n: 16 * n),
    "page": st.integers(1, 16).map(lambda n: 16 * n),
    "item": st.sampled_from([2, 4]),
    "bits": st.sampled_from([16, 8, 4]),
}


@given(**shapes)
def test_it_fits_and_is_whole_tiles(head_size, page, item, bits):
    tokens = capacity(head_size, page, item, bits)
    if bits == 16:
        assert tokens == page
        return
    assert tokens % 16 == 0
    assert (
        quantized_bytes(tokens, head_size, bits) <= head_bytes(head_size, page, item) or not tokens
    )
    assert math.lcm(page, tokens) <= max(LONGEST_UNIT, page)


@pytest.mark.skipif(not native.load(), reason="the native kernels are not built")
@given(**shapes)
def test_python_and_cpp_agree(head_size, page, item, bits):
    ours = capacity(head_size, page, item, bits)
    assert ours == torch.ops.entropykv.capacity(head_size, page, item, bits)
