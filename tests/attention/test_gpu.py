# SPDX-License-Identifier: Apache-2.0
"""Tables without holes in the metadata of vLLM's backends for GPUs."""

from types import SimpleNamespace

import pytest
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from entropykv_vllm.attention.gpu import TierBuilder
from entropykv_vllm.pages.spec import Origin, TierSpec
from entropykv_vllm.plan.schedule import TierPlan

PAGE, WIDTH, REQUESTS = 32, 16, 4


class Stock:
    """As much of vLLM's builders as ours stand on: they keep the tensors they are given."""

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device) -> None:
        self.num_heads_q = 2

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        return common_attn_metadata

    def build_for_cudagraph_capture(self, common_attn_metadata):
        metadata = self.build(0, common_attn_metadata)
        metadata.seq_lens.fill_(1)
        return metadata


class Builder(TierBuilder, Stock):
    pass


def make(bits: int, block_size: int = PAGE) -> Builder:
    plan = TierPlan("all", PAGE, PAGE, 128, 128, 64, 0.5, 0, bits=bits)
    spec = TierSpec(
        block_size=block_size,
        num_kv_heads=1,
        head_size=64,
        dtype=torch.float16,
        plan=plan,
        origin=Origin("0", "", "here"),
    )
    config = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=PAGE * WIDTH),
        scheduler_config=SimpleNamespace(max_num_seqs=REQUESTS),
    )
    return Builder(spec, ["layer"], config, torch.device("cpu"))


def step(rows: list[list[int]], lengths: list[int]) -> CommonAttentionMetadata:
    """Requests that decode a token each."""
    table = torch.zeros(len(rows), WIDTH, dtype=torch.int32)
    for request, row in enumerate(rows):
        table[request, : len(row)] = torch.tensor(row)
    starts = torch.arange(len(rows) + 1, dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        num_reqs=len(rows),
        num_actual_tokens=len(rows),
        max_query_len=1,
        max_seq_len=max(lengths),
        block_table_tensor=table,
        slot_mapping=torch.arange(len(rows)),
    )


#: A row after its first segment was collapsed to two pages, and one that is all hot.
ROWS, LENGTHS = [[7, 8, 0, 0, 11, 12, 13, 14, 15, 16], [5, 6]], [300, 40]
TABLE = [[7, 8, 11, 12, 13, 14, 15, 16], [5, 6]]
COLD, HOT = [2, 0], [300 - 128, 40]


def test_kernels_of_vllm_read_tables_without_holes_and_the_tokens_that_are_held():
    made, before = make(16), step(ROWS, LENGTHS)
    found = made.build(0, before)
    assert [row[row != 0].tolist() for row in found.block_table_tensor] == TABLE
    assert found.block_table_tensor[0, :8].tolist() == TABLE[0]
    assert found.seq_lens.tolist() == [2 * PAGE + HOT[0], HOT[1]]
    assert before.seq_lens.tolist() == LENGTHS


def test_ours_read_cold_pages_and_hot_tokens():
    found = make(4).build(0, step(ROWS, LENGTHS))
    assert found.table[0, :8].tolist() == TABLE[0]
    assert (found.cold.tolist(), found.hot.tolist()) == (COLD, HOT)


def tensors(metadata) -> list[torch.Tensor]:
    names = ("table", "cold", "hot", "block_table_tensor", "seq_lens")
    return [getattr(metadata, name) for name in names if hasattr(metadata, name)]


@pytest.mark.parametrize("bits", [16, 4])
def test_a_graph_reads_each_step_where_it_was_captured(bits):
    made = make(bits)
    captured = made.build_for_cudagraph_capture(step([[0]] * REQUESTS, [PAGE * WIDTH] * REQUESTS))
    replayed = made.build(0, step(ROWS, LENGTHS))
    for old, new in zip(tensors(captured), tensors(replayed), strict=True):
        assert old.data_ptr() == new.data_ptr()
        assert torch.equal(old[: len(new)], new)


def test_what_a_capture_shortens_is_not_the_runners():
    lengths = step([[0]] * 2, [PAGE * WIDTH] * 2)
    assert make(16).build_for_cudagraph_capture(lengths).seq_lens.tolist() == [1, 1]
    assert lengths.seq_lens.tolist() == [PAGE * WIDTH] * 2


def test_a_kernel_that_reads_other_pages_than_ours_is_refused():
    with pytest.raises(ValueError, match=r"reads pages of 16 tokens.* of 32: set --block-size 16"):
        make(16, block_size=PAGE // 2)


def test_more_requests_than_the_workspace_has_room_for_are_an_error():
    rows = REQUESTS + 1
    with pytest.raises(RuntimeError, match="size"):
        make(4).build(0, step([[5]] * rows, [20] * rows))
