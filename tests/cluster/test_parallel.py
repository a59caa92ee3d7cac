# SPDX-License-Identifier: Apache-2.0
"""A model spread over processes answers as it does in one, token for token."""

import pytest

from .ray_nodes import cluster

pytestmark = pytest.mark.cluster


def test_pipeline_stages_of_one_machine(answers, alone):
    assert answers(pipeline_parallel_size=2, distributed_executor_backend="mp") == alone


def test_pipeline_stages_on_ray(answers, alone):
    with cluster([2]) as address:
        found = answers(address, pipeline_parallel_size=2, distributed_executor_backend="ray")
    assert found == alone


def test_kv_heads_of_one_machine(answers, alone):
    """Each worker has one of the three KV heads; sums over heads come in another order."""
    found = answers(tensor_parallel_size=3, distributed_executor_backend="mp")
    assert [tokens[0] for tokens in found] == [tokens[0] for tokens in alone]
