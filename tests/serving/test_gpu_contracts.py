# SPDX-License-Identifier: Apache-2.0
"""What the GPU side relies on inside vLLM: if a release moves it, the failing sentence names it.

vLLM's sources are read and not imported, since much of them runs on GPUs only. The environment
variable ENTROPYKV_VLLM_SOURCES names a folder with another unpacked `vllm` package to read.
"""

import ast
import importlib.util
import os
import re
from functools import lru_cache
from pathlib import Path

import pytest


def _package() -> Path:
    if folder := os.environ.get("ENTROPYKV_VLLM_SOURCES"):
        return Path(folder) / "vllm"
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])


PACKAGE = _package()
_WRITTEN = re.search(r"__version__ = version = '(.+)'", (PACKAGE / "_version.py").read_text())
VERSION = f"vLLM {_WRITTEN[1] if _WRITTEN else 'of an unknown version'}"

TABLES = "v1.worker.gpu.block_table"
BUFFERS = "v1.worker.gpu.buffer_utils"
RUNNER = "v1.worker.gpu.model_runner"
GRAPHS = "v1.worker.gpu.cudagraph_utils"
WORKER = "v1.worker.gpu_worker"
SCHEDULER = "v1.core.sched.scheduler"
AHEAD = "v1.core.sched.async_scheduler"
BACKEND = "v1.attention.backend"
FLASH = "v1.attention.backends.flash_attn"
TRITON = "v1.attention.backends.triton_attn"
REGISTRY = "v1.attention.backends.registry"


@lru_cache
def source(module: str) -> str:
    return (PACKAGE / f"{module.replace('.', '/')}.py").read_text()


@lru_cache
def tree(module: str) -> ast.Module:
    return ast.parse(source(module))


def members(module: str, path: str) -> dict[str, ast.AST]:
    """What a module or a class of it defines, by name."""
    node: ast.AST = tree(module)
    for name in filter(None, path.split(".")):
        node = _named(node)[name]
    return _named(node)


def _named(node) -> dict[str, ast.AST]:
    found: dict[str, ast.AST] = {}
    for child in node.body:
        if isinstance(child, ast.ClassDef | ast.FunctionDef):
            found[child.name] = child
        elif isinstance(child, ast.AnnAssign):
            found[child.target.id] = child
        elif isinstance(child, ast.Assign) and isinstance(child.targets[0], ast.Name):
            found[child.targets[0].id] = child
    return found


def definition(module: str, path: str):
    """A function or class of vLLM; the sentence that fails if it is gone."""
    *owner, name = path.split(".")
    found = members(module, ".".join(owner)).get(name)
    assert found is not None, f"{VERSION} has no {path} in vllm.{module}"
    return found


def parameters(module: str, path: str) -> list[str]:
    arguments = definition(module, path).args
    return [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]


def text(module: str, path: str) -> str:
    """The source of a function or class, with whitespace as single blanks."""
    return " ".join(ast.get_source_segment(source(module), definition(module, path)).split())


def says(module: str, path: str, *parts: str) -> None:
    """Assert that parts stand in a function, in this order."""
    whole, at = text(module, path), 0
    for part in parts:
        found = whole.find(part, at)
        assert found >= 0, f"{VERSION} no longer says {part!r} (there) in vllm.{module}:{path}"
        at = found + len(part)


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
def test_what_is_overridden_or_called_has_the_known_parameters(where):
    found = parameters(*where)
    assert found == SIGNATURES[where], f"{VERSION} changed vllm.{where[0]}:{where[1]}"


# -- rows of the V2 model runner (serving.tables) ------------------------------------------------


def test_a_runner_can_be_told_by_its_attributes():
    says(RUNNER, "GPUModelRunner.__init__", "self.req_states = RequestState(")
    says(RUNNER, "GPUModelRunner.initialize_kv_cache", "self.block_tables = BlockTables(")
    says("v1.worker.gpu.states", "RequestState.__init__", "self.req_id_to_index: dict[str, int]")
    for name in ("self.input_batch = ", "self.requests: dict["):
        says("v1.worker.gpu_model_runner", "GPUModelRunner", name)


def test_each_page_group_has_rows_that_are_written_in_stages():
    says(
        TABLES,
        "BlockTables.__init__",
        "for max_num_blocks in max_num_blocks_per_group: block_table = StagedWriteTensor(",
        "(self.max_num_reqs, max_num_blocks), dtype=torch.int32",
        "self.block_tables.append(block_table)",
    )


def test_rows_are_appended_to_behind_what_is_there():
    says(
        TABLES,
        "BlockTables.append_block_ids",
        "start = self.num_blocks.np[i, req_index] if not overwrite else 0",
        ".stage_write(req_index, start, block_ids)",
    )


def test_what_was_staged_before_a_step_is_written_before_it_reads_rows():
    says(
        RUNNER,
        "GPUModelRunner.execute_model",
        *("self.finish_requests(", "self.add_requests(", "self.update_requests("),
        *("self.block_tables.apply_staged_writes()", "self.prepare_attn(input_batch)"),
    )
    says(BUFFERS, "StagedWriteTensor.apply_write", "_apply_write_kernel[", "clear_staged_writes()")


def test_a_resumed_request_comes_to_v2_as_a_new_one():
    says(
        SCHEDULER,
        "Scheduler.schedule",
        "if self.use_v2_model_runner: scheduled_new_reqs.extend(scheduled_resumed_reqs)",
    )


# -- the worker (serving.worker) -----------------------------------------------------------------


def test_the_model_runner_is_made_with_the_device():
    says(WORKER, "Worker.init_device", "self._init_workspace_and_model_runner()")
    says(WORKER, "Worker._init_workspace_and_model_runner", "self._make_model_runner()")


def test_whoever_asks_for_specs_asks_the_model_runner():
    says(WORKER, "Worker.get_kv_cache_spec", "return self.model_runner.get_kv_cache_spec()")
    says(GRAPHS, "_init_minimal_kv_cache_for_profiling", "runner.get_kv_cache_spec()")
    v1 = "GPUModelRunner._init_minimal_kv_cache_for_profiling"
    says("v1.worker.gpu_model_runner", v1, "self.get_kv_cache_spec()")


def test_layers_have_their_pages_once_the_worker_is_initialized():
    says(WORKER, "Worker.initialize_from_config", "self.model_runner.initialize_kv_cache(")
    says(RUNNER, "GPUModelRunner.initialize_kv_cache", "init_kv_cache(")
    says("v1.worker.gpu.attn_utils", "init_kv_cache", "bind_kv_cache_to_layers(", "forward_context")


def test_only_the_warm_up_runs_steps_that_nobody_scheduled():
    """A step without moves is refused at any other time."""
    warm_up = text(WORKER, "Worker.compile_or_warm_up_model")
    if "return self._compile_or_warm_up_model()" in warm_up:
        warm_up = text(WORKER, "Worker._compile_or_warm_up_model")
    assert "self.execute_model" in warm_up, f"{VERSION} warms up without the worker's steps"
    callers = text(WORKER, "Worker").count("self.execute_model")
    assert callers == 1, f"{VERSION} runs steps in {callers} places of the worker"
    for folder in ("v1/worker", "v1/engine", "v1/executor", "distributed"):
        for path in (PACKAGE / folder).rglob("*.py"):
            if path.name != "worker_base.py":
                found = "worker.execute_model(" in path.read_text()
                assert not found, f"{VERSION} runs steps of its own in {path}"


# -- the scheduler (serving.scheduler) -----------------------------------------------------------


def test_the_scheduler_that_plans_ahead_leaves_alone_what_ours_overrides():
    node = definition(AHEAD, "AsyncScheduler")
    assert [base.id for base in node.bases] == ["Scheduler"], f"{VERSION} plans ahead otherwise"
    ours = {"schedule", "make_stats", "_mamba_block_aligned_split"}
    taken = ours & members(AHEAD, "AsyncScheduler").keys()
    assert not taken, f"{VERSION} overrides {taken} when it plans ahead"
    says(AHEAD, "AsyncScheduler.__init__", "(self, *args, **kwargs)", "super().__init__(*args")


def test_the_scheduler_is_found_by_name_and_called_with_the_configuration():
    say = "SchedulerConfig.get_scheduler_cls"
    says("config.scheduler", say, "return resolve_obj_by_qualname(self.scheduler_cls)")
    says("v1.engine.core", "EngineCore.__init__", "get_scheduler_cls()", "vllm_config=vllm_config,")


def test_a_running_request_that_gets_no_tokens_waits():
    says(
        SCHEDULER,
        "Scheduler.schedule",
        "if self.need_mamba_block_aligned_split: num_new_tokens = self._mamba_block_aligned_split(",
        "if num_new_tokens == 0:",
        "req_index += 1 continue",
        "self.kv_cache_manager.allocate_slots(",
    )


def test_tokens_of_steps_in_flight_are_counted_and_not_yet_moved():
    count = "request.num_in_flight_tokens"
    says(SCHEDULER, "Scheduler._update_after_schedule", f"{count} += num_scheduled_token")
    says(SCHEDULER, "Scheduler.update_from_output", f"{count} -= num_tokens_scheduled")
    says(
        "v1.core.kv_cache_manager",
        "KVCacheManager.allocate_slots",
        "self.coordinator.remove_skipped_blocks(",
        f"max(0, total_computed_tokens - {count}),",
        "self.coordinator.allocate_new_blocks(",
    )


# -- attention (attention.backends, attention.gpu) -----------------------------------------------


def test_a_kind_of_layers_can_have_a_backend_of_its_own():
    assert "CUSTOM" in members(REGISTRY, "AttentionBackendEnum"), f"{VERSION} has no CUSTOM"
    definition(REGISTRY, "AttentionBackendEnum.get_class")
    assert {"backend", "backend_per_kind"} <= members("config.attention", "AttentionConfig").keys()
    says(
        "v1.attention.selector",
        "get_attn_backend",
        "backend = attention_config.backend_per_kind.get(kind.value, backend)",
        "_cached_get_attn_backend( backend=backend",
    )
    kinds = text("v1.kv_cache_interface", "KVCacheSpecKind")
    assert 'FULL_ATTENTION = "full_attention"' in kinds, f"{VERSION} names full attention otherwise"
    says("platforms.cuda", "CudaPlatformBase.get_attn_backend_cls", "validate_configuration(")


def test_the_rows_layouts_have_their_names():
    layouts = members("v1.kv_cache_layout", "KVCacheLayout")
    assert {"LBHNC", "BLHNC"} <= layouts.keys(), f"{VERSION} names layouts otherwise"


def test_a_step_is_described_by_what_we_replace():
    fields = members(BACKEND, "CommonAttentionMetadata")
    known = {"query_start_loc", "seq_lens", "block_table_tensor", "num_actual_tokens"}
    known |= {"max_query_len", "replace"}
    assert known <= fields.keys(), f"{VERSION} has no {known - fields.keys()} of a step"


@pytest.mark.parametrize("module", [FLASH, TRITON])
def test_builders_take_tables_and_lengths_from_the_steps_description(module):
    name = "FlashAttention" if module == FLASH else "TritonAttention"
    build = text(module, f"{name}MetadataBuilder.build")
    for part in ("seq_lens = common_attn_metadata.seq_lens", ".block_table_tensor"):
        assert part in build, f"{VERSION} builds the metadata of {name} without {part}"
    says(module, f"{name}MetadataBuilder.__init__", "self.num_heads_q = ")
    impl = text(module, f"{name}Impl.__init__")
    for part in ("self.alibi_slopes = ", "self.logits_soft_cap = ", "self.sinks = "):
        assert part in impl, f"{VERSION} has no {part} of {name}"


@pytest.mark.parametrize("module", [FLASH, TRITON])
def test_new_tokens_are_stored_apart_from_attention(module):
    name = "FlashAttention" if module == FLASH else "TritonAttention"
    says(module, f"{name}Backend", "forward_includes_kv_cache_update: bool = False")
    definition(module, f"{name}Impl.do_kv_cache_update")


def test_metadata_is_handed_on_to_other_groups_only_where_builders_allow_it():
    says(
        "v1.worker.gpu.attn_utils",
        "build_attn_metadata",
        "supports_update_block_table",
        "update_block_table(",
        "build_metadata_for_cudagraph_capture(",
        "attn_group.build_metadata(",
    )
    says("v1.worker.gpu_model_runner", "GPUModelRunner", "and builder.supports_update_block_table")
