# SPDX-License-Identifier: Apache-2.0
"""Attention of decoded tokens, of chunks of prompts, and of both at once."""

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from entropykv_vllm.evaluation.gpu_check.pools import Shape, random_requests
from entropykv_vllm.kernels import reference
from entropykv_vllm.kernels.gpu import attention_decode
from entropykv_vllm.kernels.gpu.attention import attention, new_workspace
from tests.kernels.paged import Batch, batches

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


def requests_of(shape, bits, lengths):
    """A `Batch` in float32, with NaN wherever nothing may be read."""
    made = random_requests(shape, torch.float32, bits, lengths, 20.0, True)
    return Batch(**vars(made), order="rows")


@pytest.mark.parametrize("bits", [16, 4])
@pytest.mark.parametrize(
    "shape",
    [Shape(28, 4, 128, 32), Shape(9, 1, 80, 48), Shape(16, 1, 64, 16), Shape(71, 1, 64, 16)],
    ids=str,
)
def test_many_query_heads_share_a_head(shape, bits):
    """Up to as many as a program has rows, and more."""
    torch.manual_seed(4)
    batch = requests_of(shape, bits, [(2, 70, 1), (0, 33, 5), (1, 20, 20), (0, 1, 1)])
    check(batch, run(batch))


def test_a_batch_may_be_padded_with_requests_that_are_not_there():
    """As a captured graph does: rows of zeros, also behind the queries, and nothing else at all."""
    batch = requests_of(Shape(4, 2, 32, 16), 16, [(1, 9, 1)])
    zeros = torch.zeros(2, dtype=torch.int32)
    padded = replace(
        batch,
        starts=torch.cat([batch.starts, batch.starts[-1:].expand(2)]),
        table=torch.cat([batch.table, torch.zeros_like(batch.table).expand(2, -1)]),
        cold=torch.cat([batch.cold, zeros]),
        hot=torch.cat([batch.hot, zeros]),
    )
    assert torch.equal(run(padded), run(batch))
    idle = replace(padded, starts=padded.starts * 0)
    assert run(idle).isnan().all()


@pytest.mark.parametrize("room", [(1, 4, 32), (2, 2, 32), (2, 4, 48)])
def test_a_workspace_that_is_too_small_is_refused(room):
    batch = requests_of(Shape(4, 2, 32, 16), 16, [(0, 9, 1), (1, 3, 1)])
    workspace = new_workspace(*room, "cpu")
    with pytest.raises(ValueError, match="cannot serve 2 requests"):
        batch.run(lambda *arguments: attention(*arguments, longest=1, workspace=workspace))


def test_query_heads_that_cannot_be_shared_are_refused():
    batch = requests_of(Shape(4, 2, 32, 16), 16, [(0, 9, 1)])
    odd = replace(batch, query=batch.query[:, :3])
    with pytest.raises(ValueError, match="3 query heads cannot share 2"):
        odd.run(lambda *arguments: attention(*arguments, longest=1))
