# SPDX-License-Identifier: Apache-2.0
"""What the plugin relies on inside vLLM: if a release moves it, the failing sentence names it."""

import dataclasses
import inspect
import pickle

import pytest
import vllm
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.worker.block_table import BlockTable
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from entropykv_vllm.pages.moves import PageMove
from entropykv_vllm.serving.metrics import pack, unpack
from entropykv_vllm.serving.scheduler import MOVES

VERSION = f"vLLM {vllm.__version__}"

SIGNATURES = {
    SingleTypeKVCacheManager.remove_skipped_blocks: [
        "self",
        "request_id",
        "processed_computed_tokens",
        "num_prompt_tokens",
    ],
    SingleTypeKVCacheManager.add_local_computed_blocks: [
        "self",
        "request_id",
        "new_computed_blocks",
        "num_local_computed_tokens",
        "num_external_computed_tokens",
    ],
    SingleTypeKVCacheManager.allocate_new_blocks: [
        "self",
        "request_id",
        "num_tokens",
        "num_tokens_main_model",
    ],
    SingleTypeKVCacheManager.cache_blocks: [
        "self",
        "request",
        "num_tokens",
        "retention_interval",
        "replay_boundaries",
    ],
    SingleTypeKVCacheManager.pop_blocks_for_free: ["self", "request_id"],
    SingleTypeKVCacheManager.get_num_blocks_to_allocate: [
        "self",
        "request_id",
        "num_tokens",
        "new_computed_blocks",
        "total_computed_tokens",
        "num_local_computed_tokens",
        "num_tokens_main_model",
        "apply_admission_cap",
        "prefill_end",
    ],
    BlockPool._insert_block_hash: ["self", "block_hash_with_group_id", "block", "num_tokens"],
    BlockPool.evict_blocks: ["self", "block_ids"],
    Scheduler._mamba_block_aligned_split: [
        "self",
        "request",
        "num_new_tokens",
        "num_new_local_computed_tokens",
        "num_external_computed_tokens",
    ],
    CPUAttentionMetadataBuilder.build: [
        "self",
        "common_prefix_len",
        "common_attn_metadata",
        "fast_build",
    ],
    GPUModelRunner._update_states: ["self", "scheduler_output"],
}


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda f: f.__qualname__)
def test_what_is_overridden_or_called_has_the_known_parameters(function):
    found = list(inspect.signature(function).parameters)
    assert found == SIGNATURES[function], f"{VERSION} changed {function.__qualname__}"


def test_a_step_carries_the_moves_through_pickle():
    output = SchedulerOutput.make_empty()
    move = PageMove(1, 0, "r", (0, 1), (5, 6), (7,), 4)
    setattr(output, MOVES, [move])
    received = pickle.loads(pickle.dumps(output))
    assert getattr(received, MOVES) == [move], f"{VERSION} drops unknown attributes of a step"


def test_statistics_carry_our_counts_through_vllms_encoding():
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    from entropykv_vllm.pages.manager import TierCounts

    stats = SchedulerStats()
    pack(stats, [("all", TierCounts(hot=3, freed=5)), ("all", TierCounts(hot=1))])
    sent = MsgpackEncoder().encode(EngineCoreOutputs(scheduler_stats=stats))
    received = MsgpackDecoder(EngineCoreOutputs).decode(sent).scheduler_stats
    counts = unpack(received)
    assert counts["all"]["hot"] == 4, f"{VERSION} drops the counts"
    assert counts["all"]["freed"] == 5
    assert received.waiting_lora_adapters == {}


def test_page_zero_is_the_null_page_and_marks_holes():
    pool = BlockPool(4, True, 16)
    assert pool.null_block.block_id == 0, f"{VERSION} moved the null page"
    assert pool.null_block.is_null


def test_an_unfinished_page_can_be_told_from_a_cached_one():
    names = {field.name for field in dataclasses.fields(KVCacheBlock)}
    assert "ref_cnt" in names, f"{VERSION} counts references elsewhere"
    assert isinstance(KVCacheBlock.block_hash, property)


def test_the_table_row_of_a_request_can_be_written():
    source = inspect.getsource(BlockTable.append_row)
    assert "self.block_table.np[row_idx" in source, f"{VERSION} keeps table rows elsewhere"


def test_the_scheduler_asks_where_to_end_a_step():
    source = inspect.getsource(Scheduler.schedule)
    asked = source.count("if self.need_mamba_block_aligned_split:")
    assert asked == 2, f"{VERSION} asks {asked} times where a step ends, not twice"


def test_moves_are_planned_before_anything_is_allocated():
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    source = inspect.getsource(KVCacheManager.allocate_slots)
    order = [source.index(f"self.coordinator.{name}(") for name in ("remove_skipped_blocks",)]
    order.append(source.index("self.coordinator.allocate_new_computed_blocks("))
    order.append(source.index("self.coordinator.allocate_new_blocks("))
    order.append(source.index("self.coordinator.cache_blocks("))
    assert order == sorted(order), f"{VERSION} allocates in another order"


def test_the_live_page_is_looked_up_where_its_gate_is_held_open():
    from vllm.plugins.endpoint_plugins import interface

    source = inspect.getsource(interface.attach_endpoint_plugins)
    assert "from vllm.plugins import load_endpoint_plugins" in source, f"{VERSION} looks elsewhere"


def test_the_servers_process_knows_the_tokens_of_its_requests():
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer
    from vllm.v1.engine.output_processor import OutputProcessor, RequestState

    assert "self.output_processor = " in inspect.getsource(AsyncLLM.__init__)
    assert "self.request_states" in inspect.getsource(OutputProcessor.__init__)
    source = inspect.getsource(RequestState.__init__)
    for name in ("prompt_token_ids", "detokenizer"):
        assert f"self.{name} = " in source, f"{VERSION} keeps {name} elsewhere"
    assert isinstance(IncrementalDetokenizer.output_token_ids, property)


def test_the_key_of_the_server_can_be_checked_alone():
    from starlette.datastructures import Headers
    from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

    check = AuthenticationMiddleware(None, ["geheim"]).verify_token
    assert check(Headers({"authorization": "Bearer geheim"}))
    assert not check(Headers({"authorization": "Bearer other"}))
