# SPDX-License-Identifier: Apache-2.0
"""Who attends to whom, against the masks of xformers: an oracle that is not ours."""

import warnings

import pytest
import torch
from hypothesis import given, settings

from entropykv_vllm.kernels import reference
from tests.kernels.paged import batches

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    attn_bias = pytest.importorskip(
        "xformers.ops.fmha.attn_bias", reason="the extra 'xformers' is not installed"
    )


def tokens_of(batch):
    """The keys and values of all requests behind one another, and how many each has."""
    rows = zip(batch.table.long(), batch.cold.tolist(), batch.hot.tolist(), strict=True)
    found = [reference._tokens(batch.cache, *row, batch.bits, batch.order) for row in rows]
    keys, values = (torch.cat(side, 1) for side in zip(*found, strict=True))
    return keys, values, [k.shape[1] for k, _ in found]


@settings(deadline=None, max_examples=60)
@given(batches())
def test_each_query_sees_what_xformers_masks_let_through(batch):
    new = batch.starts.diff().tolist()
    if not sum(new):
        return
    keys, values, lengths = tokens_of(batch)
    mask = attn_bias.BlockDiagonalCausalFromBottomRightMask.from_seqlens(new, lengths)
    heads = keys.shape[0]
    query = batch.query.float().transpose(0, 1).unflatten(0, (heads, -1))
    logits = query @ keys[:, None].mT * batch.scale
    if batch.softcap:
        logits = batch.softcap * torch.tanh(logits / batch.softcap)
    logits = logits + mask.materialize(logits.shape[-2:])
    if batch.sinks is not None:
        extra = batch.sinks.view(heads, -1, 1, 1).expand(*logits.shape[:-1], 1)
        logits = torch.cat([logits, extra], -1)
    weights = logits.softmax(-1)[..., : keys.shape[1]]
    expected = (weights @ values[:, None]).flatten(0, 1).transpose(0, 1)
    error = (batch.run(reference.attention).float() - expected).abs().max()
    assert error <= 1e-2 * batch.largest_value()
