# SPDX-License-Identifier: Apache-2.0
"""What the GPU side relies on inside vLLM: if a release moves it, the failing sentence names it.

Each release that is supported is read: the one that is installed, and what `make vllm-sources` has
fetched of the other one. The environment variable ENTROPYKV_VLLM_SOURCES names a folder with
another unpacked `vllm` package, to be read in their place.
"""

import re

import pytest

from .sources import RELEASES, Sources, sources

TABLES = "v1.worker.gpu.block_table"
BUFFERS = "v1.worker.gpu.buffer_utils"
RUNNER = "v1.worker.gpu.model_runner"
RUNNER_V1 = "v1.worker.gpu_model_runner"
GRAPHS = "v1.worker.gpu.cudagraph_utils"
WORKER = "v1.worker.gpu_worker"
SCHEDULER = "v1.core.sched.scheduler"
AHEAD = "v1.core.sched.async_scheduler"
BACKEND = "v1.attention.backend"
FLASH = "v1.attention.backends.flash_attn"
TRITON = "v1.attention.backends.triton_attn"
REGISTRY = "v1.attention.backends.registry"


@pytest.fixture(params=RELEASES)
def vllm(request) -> Sources:
    return sources(request.param)


FORWARD = ["self", "layer", "query", "key", "value", "kv_cache", "attn_metadata", "output"]
FORWARD += ["output_scale", "output_block_scale"]
BUILD = ["self", "common_prefix_len", "common_attn_metadata", "fast_build"]
BUILDER = ["self", "kv_cache_spec", "layer_names", "vllm_config", "device"]

SIGNATURES = {
    (BUFFERS, "StagedWriteTensor.stage_write"): ["self", "index", "start", "x"],
    (WORKER, "Worker.__init__"): [
        *("self", "vllm_config", "local_rank", "rank", "distributed_init_method"),
        "is_driver_worker",
    ],
    (WORKER, "Worker.init_device"): ["self"],
    (WORKER, "Worker.get_kv_cache_spec"): ["self"],
    (WORKER, "Worker.initialize_from_config"): ["self", "kv_cache_config"],
    (WORKER, "Worker.compile_or_warm_up_model"): ["self"],
    (WORKER, "Worker.execute_model"): ["self", "scheduler_output"],
    (RUNNER, "GPUModelRunner.get_kv_cache_spec"): ["self"],
    (SCHEDULER, "Scheduler._mamba_block_aligned_split"): [
        *("self", "request", "num_new_tokens", "num_new_local_computed_tokens"),
        "num_external_computed_tokens",
    ],
    (BACKEND, "AttentionMetadataBuilder.__init__"): BUILDER,
    (FLASH, "FlashAttentionMetadataBuilder.__init__"): BUILDER,
    (TRITON, "TritonAttentionMetadataBuilder.__init__"): BUILDER,
    (FLASH, "FlashAttentionMetadataBuilder.build"): BUILD,
    (TRITON, "TritonAttentionMetadataBuilder.build"): BUILD,
    (FLASH, "FlashAttentionMetadataBuilder.get_cudagraph_support"): [
        *("cls", "vllm_config", "kv_cache_spec"),
    ],
    (BACKEND, "AttentionMetadataBuilder.get_cudagraph_support"): [
        *("cls", "vllm_config", "kv_cache_spec"),
    ],
    (BACKEND, "AttentionMetadataBuilder.build_for_cudagraph_capture"): [
        *("self", "common_attn_metadata"),
    ],
    (FLASH, "FlashAttentionImpl.forward"): FORWARD,
    (TRITON, "TritonAttentionImpl.forward"): FORWARD,
    (BACKEND, "AttentionBackend.supported_kv_cache_layouts"): ["cls"],
    (FLASH, "FlashAttentionBackend.supports_head_size"): ["cls", "head_size"],
    (FLASH, "FlashAttentionBackend.supports_compute_capability"): ["cls", "capability"],
    ("v1.attention.backends.fa_utils", "is_flash_attn_varlen_func_available"): [],
    (REGISTRY, "register_backend"): ["backend", "class_path", "is_mamba"],
}


@pytest.mark.parametrize("where", SIGNATURES, ids=lambda where: where[1])
def test_what_is_overridden_or_called_has_the_known_parameters(vllm, where):
    found = vllm.parameters(*where)
    assert found == SIGNATURES[where], f"{vllm.version} changed vllm.{where[0]}:{where[1]}"


# -- rows of the V2 model runner (serving.tables) ------------------------------------------------


def test_a_runner_can_be_told_by_its_attributes(vllm):
    vllm.says(RUNNER, "GPUModelRunner.__init__", "self.req_states = RequestState(")
    vllm.says(RUNNER, "GPUModelRunner.initialize_kv_cache", "self.block_tables = BlockTables(")
    vllm.says(
        "v1.worker.gpu.states", "RequestState.__init__", "self.req_id_to_index: dict[str, int]"
    )
    for name in ("self.input_batch = ", "self.requests: dict["):
        vllm.says(RUNNER_V1, "GPUModelRunner", name)


def test_each_page_group_has_rows_that_are_written_in_stages(vllm):
    vllm.says(
        TABLES,
        "BlockTables.__init__",
        "for max_num_blocks in max_num_blocks_per_group: block_table = StagedWriteTensor(",
        "(self.max_num_reqs, max_num_blocks), dtype=torch.int32",
        "self.block_tables.append(block_table)",
    )


def test_rows_are_appended_to_behind_what_is_there(vllm):
    vllm.says(
        TABLES,
        "BlockTables.append_block_ids",
        "start = self.num_blocks.np[i, req_index] if not overwrite else 0",
        ".stage_write(req_index, start, block_ids)",
    )


def test_what_was_staged_before_a_step_is_written_before_it_reads_rows(vllm):
    vllm.says(
        RUNNER,
        "GPUModelRunner.execute_model",
        *("self.finish_requests(", "self.add_requests(", "self.update_requests("),
        *("self.block_tables.apply_staged_writes()", "self.prepare_attn(input_batch)"),
    )
    vllm.says(
        BUFFERS, "StagedWriteTensor.apply_write", "_apply_write_kernel[", "clear_staged_writes()"
    )


def test_a_resumed_request_comes_to_v2_as_a_new_one(vllm):
    vllm.says(
        SCHEDULER,
        "Scheduler.schedule",
        "if self.use_v2_model_runner: scheduled_new_reqs.extend(scheduled_resumed_reqs)",
    )


# -- the worker (serving.worker) -----------------------------------------------------------------


def test_the_model_runner_is_made_with_the_device(vllm):
    vllm.says(WORKER, "Worker.init_device", "self._init_workspace_and_model_runner()")
    vllm.says(WORKER, "Worker._init_workspace_and_model_runner", "self._make_model_runner()")


def test_whoever_asks_for_specs_asks_the_model_runner(vllm):
    vllm.says(WORKER, "Worker.get_kv_cache_spec", "return self.model_runner.get_kv_cache_spec()")
    vllm.says(GRAPHS, "_init_minimal_kv_cache_for_profiling", "runner.get_kv_cache_spec()")
    v1 = "GPUModelRunner._init_minimal_kv_cache_for_profiling"
    vllm.says(RUNNER_V1, v1, "self.get_kv_cache_spec()")


def test_layers_have_their_pages_once_the_worker_is_initialized(vllm):
    vllm.says(WORKER, "Worker.initialize_from_config", "self.model_runner.initialize_kv_cache(")
    vllm.says(RUNNER, "GPUModelRunner.initialize_kv_cache", "init_kv_cache(")
    vllm.says(
        "v1.worker.gpu.attn_utils", "init_kv_cache", "bind_kv_cache_to_layers(", "forward_context"
    )


def test_only_the_warm_up_runs_steps_that_nobody_scheduled(vllm):
    """A step without moves is refused at any other time."""
    warm_up = vllm.text(WORKER, "Worker.compile_or_warm_up_model")
    if "return self._compile_or_warm_up_model()" in warm_up:
        warm_up = vllm.text(WORKER, "Worker._compile_or_warm_up_model")
    assert "self.execute_model" in warm_up, f"{vllm.version} warms up without the worker's steps"
    callers = vllm.text(WORKER, "Worker").count("self.execute_model")
    assert callers == 1, f"{vllm.version} runs steps in {callers} places of the worker"
    for folder in ("v1/worker", "v1/engine", "v1/executor", "distributed"):
        for path in (vllm.package / folder).rglob("*.py"):
            if path.name != "worker_base.py":
                found = "worker.execute_model(" in path.read_text()
                assert not found, f"{vllm.version} runs steps of its own in {path}"


# -- cleared pages (serving.clearing) ------------------------------------------------------------


def test_the_scheduler_sends_the_pages_that_its_managers_have_recorded(vllm):
    name = "_get_new_block_ids_to_zero"
    vllm.says(SCHEDULER, "Scheduler.schedule", f"new_block_ids_to_zero=self.{name}()")
    vllm.says(
        SCHEDULER,
        f"Scheduler.{name}",
        "self.kv_cache_manager.take_new_block_ids()",
        "if not self.needs_kv_cache_zeroing: return None",
    )
    manager = "SingleTypeKVCacheManager.allocate_new_blocks"
    vllm.says("v1.core.single_type_kv_cache_manager", manager, "if self._record_new_block_ids:")


def test_runners_clear_pages_once_they_can_and_before_the_step(vllm):
    for module, name in ((RUNNER, "update_requests"), (RUNNER_V1, "_update_states")):
        vllm.definition(module, "GPUModelRunner._init_kv_zero_meta")
        vllm.says(module, f"GPUModelRunner.{name}", "if scheduler_output.new_block_ids_to_zero:")
    vllm.says(
        WORKER,
        "Worker.initialize_from_config",
        *("self.model_runner.initialize_kv_cache(", "self.model_runner._init_kv_zero_meta()"),
    )
    vllm.definition("v1.kv_cache_interface", "KVCacheConfig.needs_kv_cache_zeroing")


def test_the_runner_for_cpus_clears_by_a_method_that_takes_pages(vllm):
    name = "CPUModelRunner._zero_block_ids"
    assert vllm.parameters("v1.worker.cpu_model_runner", name) == ["self", "block_ids"]


# -- the scheduler (serving.scheduler) -----------------------------------------------------------


def test_the_scheduler_that_plans_ahead_leaves_alone_what_ours_overrides(vllm):
    node = vllm.definition(AHEAD, "AsyncScheduler")
    assert [base.id for base in node.bases] == ["Scheduler"], (
        f"{vllm.version} plans ahead otherwise"
    )
    ours = {"schedule", "make_stats", "_mamba_block_aligned_split"}
    taken = ours & vllm.members(AHEAD, "AsyncScheduler").keys()
    assert not taken, f"{vllm.version} overrides {taken} when it plans ahead"
    vllm.says(AHEAD, "AsyncScheduler.__init__", "(self, *args, **kwargs)", "super().__init__(*args")


def test_the_scheduler_is_found_by_name_and_called_with_the_configuration(vllm):
    say = "SchedulerConfig.get_scheduler_cls"
    vllm.says("config.scheduler", say, "return resolve_obj_by_qualname(self.scheduler_cls)")
    vllm.says(
        "v1.engine.core", "EngineCore.__init__", "get_scheduler_cls()", "vllm_config=vllm_config,"
    )


def test_the_process_of_an_engine_core_is_known_by_its_name(vllm):
    start = ("target=EngineCoreProc.run_engine_core,", 'name=f"EngineCore')
    vllm.says("v1.engine.utils", "CoreEngineProcManager.__init__", *start)


def test_a_running_request_that_gets_no_tokens_waits(vllm):
    vllm.says(
        SCHEDULER,
        "Scheduler.schedule",
        "if self.need_mamba_block_aligned_split: num_new_tokens = self._mamba_block_aligned_split(",
        "if num_new_tokens == 0:",
        "req_index += 1 continue",
        "self.kv_cache_manager.allocate_slots(",
    )


def test_tokens_of_steps_in_flight_are_counted_and_not_yet_moved(vllm):
    count = "request.num_in_flight_tokens"
    vllm.says(SCHEDULER, "Scheduler._update_after_schedule", f"{count} += num_scheduled_token")
    vllm.says(SCHEDULER, "Scheduler.update_from_output", f"{count} -= num_tokens_scheduled")
    vllm.says(
        "v1.core.kv_cache_manager",
        "KVCacheManager.allocate_slots",
        "self.coordinator.remove_skipped_blocks(",
        f"max(0, total_computed_tokens - {count}),",
        "self.coordinator.allocate_new_blocks(",
    )


# -- attention (attention.backends, attention.gpu) -----------------------------------------------


def test_a_kind_of_layers_can_have_a_backend_of_its_own(vllm):
    assert "CUSTOM" in vllm.members(REGISTRY, "AttentionBackendEnum"), (
        f"{vllm.version} has no CUSTOM"
    )
    vllm.definition(REGISTRY, "AttentionBackendEnum.get_class")
    assert {"backend", "backend_per_kind"} <= vllm.members(
        "config.attention", "AttentionConfig"
    ).keys()
    vllm.says(
        "v1.attention.selector",
        "get_attn_backend",
        "backend = attention_config.backend_per_kind.get(kind.value, backend)",
        "_cached_get_attn_backend( backend=backend",
    )
    kinds = vllm.text("v1.kv_cache_interface", "KVCacheSpecKind")
    assert 'FULL_ATTENTION = "full_attention"' in kinds, (
        f"{vllm.version} names full attention otherwise"
    )
    vllm.says("platforms.cuda", "CudaPlatformBase.get_attn_backend_cls", "validate_configuration(")


def test_what_was_chosen_for_an_engine_before_is_remembered(vllm):
    """In a process; so it must be forgotten when ours is registered."""
    name = "_cached_get_attn_backend"
    assert f"@cache\ndef {name}(" in vllm.source("v1.attention.selector")


def test_models_whose_images_attend_in_both_directions_can_be_served_without_them(vllm):
    convertor = "transformers_utils.model_arch_config_convertor"
    name = "ModelArchConfigConvertorBase.is_mm_prefix_lm"
    vllm.says(convertor, name, "if not supports_multimodal: return False")
    assert "language_model_only" in vllm.members("config.multimodal", "MultiModalConfig")
    says = "MultiModalConfig.get_limit_per_prompt"
    vllm.says("config.multimodal", says, "if self.language_model_only: return 0")


def test_the_rows_layouts_have_their_names(vllm):
    layouts = vllm.members("v1.kv_cache_layout", "KVCacheLayout")
    assert {"LBHNC", "BLHNC"} <= layouts.keys(), f"{vllm.version} names layouts otherwise"


def test_a_step_is_described_by_what_we_replace(vllm):
    fields = vllm.members(BACKEND, "CommonAttentionMetadata")
    known = {"query_start_loc", "seq_lens", "block_table_tensor", "num_actual_tokens"}
    known |= {"max_query_len", "replace"}
    assert known <= fields.keys(), f"{vllm.version} has no {known - fields.keys()} of a step"


@pytest.mark.parametrize("module", [FLASH, TRITON])
def test_builders_take_tables_and_lengths_from_the_steps_description(vllm, module):
    name = "FlashAttention" if module == FLASH else "TritonAttention"
    build = vllm.text(module, f"{name}MetadataBuilder.build")
    for part in ("seq_lens = common_attn_metadata.seq_lens", ".block_table_tensor"):
        assert part in build, f"{vllm.version} builds the metadata of {name} without {part}"
    vllm.says(module, f"{name}MetadataBuilder.__init__", "self.num_heads_q = ")
    impl = vllm.text(module, f"{name}Impl.__init__")
    for part in ("self.alibi_slopes = ", "self.logits_soft_cap = ", "self.sinks = "):
        assert part in impl, f"{vllm.version} has no {part} of {name}"


def test_common_prefixes_are_not_attended_to_apart(vllm):
    """Prefixes in common would be counted in pages of rows with holes."""
    vllm.says(RUNNER_V1, "GPUModelRunner.__init__", "self.cascade_attn_enabled = False")
    for module in (FLASH, TRITON, RUNNER, "v1.worker.gpu.attn_utils"):
        assert "cascade" not in vllm.source(module), f"{vllm.version} has it in vllm.{module}"


def test_microbatches_have_builders_of_their_own_and_attend_on_one_stream(vllm):
    """So their tables are two, and the one workspace of all layers does."""
    count = "get_num_ubatches(vllm_config.parallel_config)"
    builders = vllm.text("v1.worker.gpu.attn_utils", "init_attn_backend")
    assert f"num_metadata_builders={count}" in builders, f"{vllm.version} shares builders"
    says = "GPUModelRunner.initialize_metadata_builders"
    vllm.says(RUNNER_V1, says, "num_metadata_builders=", "num_ubatches")
    contexts = vllm.text("v1.worker.ubatching", "make_ubatch_contexts")
    assert "compute_stream=compute_stream" in contexts, f"{vllm.version} has more streams"


def test_graphs_are_padded_with_requests_of_no_tokens(vllm):
    inputs = "v1.worker.gpu.input_batch"
    vllm.says(inputs, "_prepare_pos_seq_lens_kernel", "# Pad unused seq_lens as 0")
    vllm.says(TABLES, "_gather_block_tables_kernel", "if batch_idx >= num_reqs:", "0, mask=")
    vllm.says(RUNNER_V1, "GPUModelRunner._prepare_inputs", "self.seq_lens[num_reqs:].fill_(0)")


def test_there_are_no_more_rows_than_requests_that_a_server_may_run(vllm):
    for module in (RUNNER, RUNNER_V1):
        line = "self.max_num_reqs = (self.)?scheduler_config.max_num_seqs"
        found = re.search(line, vllm.text(module, "GPUModelRunner.__init__"))
        assert found, f"{vllm.version} has other numbers of rows in vllm.{module}"


def test_steps_of_the_v2_runners_own_say_so(vllm):
    """It profiles, and idles where others of a data parallel server work, by its `execute_model`.

    Such steps come from no scheduler and bring no moves.
    """
    step = "self.execute_model( dummy_scheduler_output,"
    vllm.says(RUNNER, "GPUModelRunner._dummy_run", step, "dummy_run=True")
    assert "dummy_run" in vllm.parameters(RUNNER, "GPUModelRunner.execute_model")
    calls = vllm.source(RUNNER).count("self.execute_model(")
    assert calls == 1, f"{vllm.version} runs steps in {calls} places of the V2 runner"
    assert "self.execute_model(" not in vllm.source(RUNNER_V1)
    idle = vllm.text(WORKER, "Worker.execute_dummy_batch")
    assert "self.model_runner._dummy_run(" in idle, f"{vllm.version} runs idle steps otherwise"


def test_sleeping_ends_what_the_prefix_cache_holds_and_keeps_what_builders_made(vllm):
    vllm.says("v1.engine.core", "EngineCore.sleep", "clear_prefix_cache = level >= 1")
    vllm.says("v1.engine.core", "EngineCore.sleep", "clear_cache=clear_prefix_cache")
    pool = '_maybe_get_memory_pool_context(tag="runtime")'
    vllm.says(WORKER, "Worker.initialize_from_config", pool)
    kept = (vllm.package / "device_allocator" / "sleep_mode_backend.py").read_text()
    assert 'offload_tags: tuple[str, ...] = ("runtime", "cudagraph")' in kept
    assert vllm.parameters(WORKER, "Worker.wake_up") == ["self", "tags"]


@pytest.mark.parametrize("module", [FLASH, TRITON])
def test_new_tokens_are_stored_apart_from_attention(vllm, module):
    name = "FlashAttention" if module == FLASH else "TritonAttention"
    vllm.says(module, f"{name}Backend", "forward_includes_kv_cache_update: bool = False")
    vllm.definition(module, f"{name}Impl.do_kv_cache_update")


def test_metadata_is_handed_on_to_other_groups_only_where_builders_allow_it(vllm):
    vllm.says(
        "v1.worker.gpu.attn_utils",
        "build_attn_metadata",
        "supports_update_block_table",
        "update_block_table(",
        "build_metadata_for_cudagraph_capture(",
        "attn_group.build_metadata(",
    )
    vllm.says(RUNNER_V1, "GPUModelRunner", "and builder.supports_update_block_table")
