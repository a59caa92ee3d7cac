# SPDX-License-Identifier: Apache-2.0
"""The views that FlashAttention gets, and what vLLM's asks of them."""

import ast
import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from entropykv_vllm.kernels import reference
from entropykv_vllm.kernels.gpu.flash import flash_views
from tests.kernels.paged import batches


def gather(view, row, tokens):
    """The first tokens of some pages by the view's strides alone: ``[heads, tokens, dim]``."""
    page, heads, dim = view.shape[1:]
    t = torch.arange(tokens)[None, :, None]
    at = row[t // page] * view.stride(0) + t % page * view.stride(1)
    at = at + torch.arange(heads)[:, None, None] * view.stride(2) + torch.arange(dim)
    storage = view.as_strided((view.untyped_storage().nbytes() // view.itemsize,), (1,), 0)
    return storage[at + view.storage_offset()]


@settings(deadline=None, max_examples=25, suppress_health_check=list(HealthCheck))
@given(batch=batches(order="rows").filter(lambda batch: batch.bits == 16))
def test_plain_attention_over_the_views(plain_attention, batch):
    """Cold pages of 16 bits and hot ones are one sequence, with the new tokens at its end."""
    batch = replace(batch, softcap=0.0, sinks=None)
    expected = batch.run(lambda *arguments: reference.attention(*arguments, order="rows"))
    views = flash_views(batch.cache)
    held = (batch.cold * batch.cache.shape[2] + batch.hot).tolist()
    for request, tokens in enumerate(held):
        start, end = batch.starts[request : request + 2].tolist()
        if start < end:
            keys, values = (gather(x, batch.table[request].long(), tokens) for x in views)
            found = plain_attention(batch.query[start:end], keys, values, batch.scale)
            error = (found - expected[start:end].float()).abs().max()
            assert error <= 1e-2 * batch.largest_value()


def source_of(*path):
    """A file of the vLLM that is installed, without importing it."""
    found = importlib.util.find_spec("vllm")
    if found is None:
        pytest.skip("vLLM is not installed")
    return Path(found.submodule_search_locations[0], *path).read_text()


def test_vllm_does_not_copy_the_views():
    """Its wrapper copies what fails its only check of strides."""
    module = ast.parse(source_of("vllm_flash_attn", "flash_attn_interface.py"))
    (check,) = (x for x in module.body if getattr(x, "name", "") == "maybe_contiguous")
    names = {}
    exec(compile(ast.Module([check], []), "maybe_contiguous", "exec"), names)
    for view in flash_views(torch.zeros(3, 2, 32, 256, dtype=torch.bfloat16)):
        assert names["maybe_contiguous"](view) is view
    assert names["maybe_contiguous"](view.transpose(2, 3)).is_contiguous()


def test_vllm_makes_the_same_views():
    backend = source_of("v1", "attention", "backends", "flash_attn.py")
    assert "kv_cache.transpose(1, 2).split(self.head_size, dim=-1)" in backend
    assert "return [MultipleOf(16)]" in backend
    cache = torch.randn(3, 2, 32, 256)
    keys, values = flash_views(cache)
    assert keys.shape == values.shape == (3, 32, 2, 128)
    assert torch.equal(torch.cat([keys, values], -1), cache.transpose(1, 2))
    assert keys.data_ptr() == cache.data_ptr()


def test_what_it_would_refuse_is_refused():
    with pytest.raises(ValueError, match="FlashAttention cannot read pages of 24 tokens"):
        flash_views(torch.zeros(3, 2, 24, 256))
    with pytest.raises(ValueError, match="with strides of"):
        flash_views(torch.zeros(3, 2, 16, 2 * 128 + 2)[..., 2:])
