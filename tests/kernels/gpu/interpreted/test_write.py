# SPDX-License-Identifier: Apache-2.0
"""New tokens in hot pages."""

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from entropykv_vllm.kernels import reference
from entropykv_vllm.kernels.gpu.write import write
from tests.kernels.paged import DTYPES, HEAD_SIZES, PAGES, new_cache, seeds, strided


@settings(deadline=None, max_examples=30, suppress_health_check=list(HealthCheck))
@given(
    heads=st.integers(1, 4),
    head_size=st.sampled_from(HEAD_SIZES),
    page=st.sampled_from(PAGES),
    dtype=st.sampled_from(DTYPES),
    new_dtype=st.sampled_from(DTYPES),
    tokens=st.integers(0, 40),
    shared=st.booleans(),
    wide=st.booleans(),
    seed=seeds,
)
def test_write(heads, head_size, page, dtype, new_dtype, tokens, shared, wide, seed):
    """Slots in any order, some skipped; every other byte of the cache stays as it was."""
    torch.manual_seed(seed)
    cache = new_cache(5, heads, page, head_size, dtype, "noise", shared)
    expected = cache.clone()
    slots = torch.randperm(5 * page)[:tokens]
    slots[torch.rand(len(slots)) < 0.2] = -1
    # More rows than slots, as where vLLM pads a batch.
    # Numbers that all types hold: the interpreter cuts what bfloat16 cannot, where GPUs round it.
    sides = (torch.randint(-128, 128, (2, len(slots) + 2, heads, head_size)) / 16).to(new_dtype)
    keys, values = (strided(x, wide) for x in sides)
    reference.write(keys[:-2], values[:-2], expected, slots, "rows")
    write(keys, values, cache, slots)
    assert torch.equal(
        cache.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8)
    )
