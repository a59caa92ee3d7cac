# SPDX-License-Identifier: Apache-2.0
"""Attention of decoded tokens, of chunks of prompts, and of both at once."""

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from entropykv_vllm.kernels import reference
from entropykv_vllm.kernels.gpu import attention_decode
from entropykv_vllm.kernels.gpu.attention import attention, new_workspace
from tests.kernels.paged import batches

# What the output's rounding leaves, as a part of the largest |value|: all else is float32.
ERRORS = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}

decoded = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, 150), st.just(1)), min_size=1, max_size=3
)
mixed = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 90), st.integers(0, 20)), min_size=1, max_size=3
)


def examples(count):
    phases = [Phase.explicit, Phase.generate]  # The interpreter is too slow to shrink in.
    quiet = list(HealthCheck)
    return settings(deadline=None, max_examples=count, suppress_health_check=quiet, phases=phases)


def over_rows(*arguments):
    reference.attention(*arguments, order="rows")


def run(batch, splits=3, **options):
    """What the op writes, with NaN in the workspace before."""
    longest = int(batch.starts.diff().max())
    workspace = new_workspace(len(batch.cold), *batch.query.shape[1:], "cpu", splits)
    for floats in workspace:
        floats.fill_(torch.nan)

    def op(*arguments):
        attention(*arguments, longest=longest, workspace=workspace)

    return batch.run(op)


def check(batch, output):
    expected = batch.run(over_rows)
    if len(output):
        error = (output.double() - expected.double()).abs().max()
        assert error <= ERRORS[output.dtype] * batch.largest_value()


@pytest.fixture(autouse=True)
def _short_splits(monkeypatch):
    """So that short contexts are split too."""
    monkeypatch.setattr(attention_decode, "LEAST", 1)


@examples(25)
@given(batches(decoded, order="rows"), st.sampled_from([1, 3, 8]))
def test_decode(batch, splits):
    check(batch, run(batch, splits))


@examples(20)
@given(batches(mixed, order="rows"))
def test_prompts_and_decoding_together(batch):
    before = batch.cache.clone()
    check(batch, run(batch))
    assert torch.equal(batch.cache.view(torch.uint8), before.view(torch.uint8))


@examples(5)
@given(batches(mixed, order="rows"))
def test_bits_of_a_request_do_not_depend_on_the_batch(batch):
    together = run(batch)
    for request in range(len(batch.cold)):
        start, end = batch.starts[request : request + 2].tolist()
        if start < end:
            alone = replace(batch.part(request, 0, end - start), table=batch.table[request][None])
            assert torch.equal(run(alone), together[start:end])


@examples(1)
@given(batches(st.just([(20, 300, 1), (0, 700, 1)]), order="rows"))
def test_longer_contexts(batch):
    check(batch, run(batch, 8))
