# SPDX-License-Identifier: Apache-2.0
"""The metadata of our attention on CPUs."""

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from entropykv_vllm.attention.cpu import TierMetadataBuilder
from entropykv_vllm.attention.split import hot_starts
from entropykv_vllm.pages.spec import Origin, TierSpec
from entropykv_vllm.plan.schedule import TierPlan

PLAN = TierPlan("all", 32, 32, 64, 64, 64, 0.5, 0)


def builder() -> TierMetadataBuilder:
    """Without vLLM's part, which asks for a model."""
    made = object.__new__(TierMetadataBuilder)
    made.kv_cache_spec = TierSpec(
        block_size=32,
        num_kv_heads=1,
        head_size=64,
        dtype=torch.float16,
        plan=PLAN,
        origin=Origin("0", "", "here"),
    )
    made.policy = "norm"
    made.hot_starts = hot_starts(PLAN, 1024)
    return made


def test_a_table_is_as_wide_as_the_longest_request_of_the_step():
    """Rows of vLLM's have room for the longest request that a server may get."""
    table = torch.full((2, 4096), 99, dtype=torch.int32)  # stale, behind the requests
    table[0, :5] = torch.tensor([7, 0, 8, 9, 10])
    table[1, 0] = 11
    lengths = torch.tensor([130, 20], dtype=torch.int32)
    step = CommonAttentionMetadata(
        query_start_loc=torch.tensor([0, 1, 2], dtype=torch.int32),
        query_start_loc_cpu=torch.tensor([0, 1, 2], dtype=torch.int32),
        seq_lens=lengths,
        num_reqs=2,
        num_actual_tokens=2,
        max_query_len=1,
        max_seq_len=130,
        block_table_tensor=table,
        slot_mapping=torch.zeros(2, dtype=torch.int64),
    )
    found = builder().build(0, step)
    assert found.table.tolist() == [[7, 8, 9, 10, 0], [11, 0, 0, 0, 0]]
    assert (found.cold.tolist(), found.hot.tolist()) == ([1, 0], [66, 20])
