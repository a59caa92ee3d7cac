# SPDX-License-Identifier: Apache-2.0
"""vLLM's V2 model runner without a GPU, and engines whose steps overlap there; for processes of
their own, since it changes vLLM.

vLLM has a V2 runner for CPUs, for builds of Triton that this one is not: Triton's interpreter takes
their place. The attention of GPUs can run on it as well: our backend over vLLM's kernel.
"""

from __future__ import annotations

import os

import pytest
import torch
from vllm import SamplingParams
from vllm.config import set_current_vllm_config
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu import cudagraph_utils
from vllm.v1.worker.gpu.structured_outputs import StructuredOutputsWorker
from vllm.v1.worker.gpu.warmup import warmup_kernels
from vllm.v1.worker.worker_base import CompilationTimes

from entropykv_vllm.serving.worker import EvictionWorkerMixin, PagesInRows

WORKERS = {
    kind: f"tests.engine.runners.{name}"
    for kind, name in (("cpu", "V2Worker"), ("gpu", "V2RowsWorker"))
}


class _StartsAsGPUs(CPUWorker):
    """vLLM's CPU worker, which prepares the V2 runner as that for GPUs does, but for graphs."""

    def determine_available_memory(self) -> int:
        runner, graphs = self.model_runner, self.compilation_config
        with set_current_vllm_config(self.vllm_config):
            runner.profile_run()
            graphs.max_cudagraph_capture_size = runner.max_num_reqs
            cudagraph_utils._init_minimal_kv_cache_for_profiling(runner)
            cudagraph_utils._teardown_profiling_state(runner)
            graphs.max_cudagraph_capture_size = None
        return super().determine_available_memory()

    def compile_or_warm_up_model(self) -> CompilationTimes:
        with pytest.MonkeyPatch.context() as patch:
            # Two kernels of the warm-up the interpreter refuses: of grammars and of top-k.
            patch.setattr(StructuredOutputsWorker, "apply_grammar_bitmask", lambda *args: None)
            patch.setattr(
                SamplingParams, "for_sampler_warmup", lambda: SamplingParams(temperature=0)
            )
            warmup_kernels(self.model_runner, self.execute_model, self.sample_tokens)
        return super().compile_or_warm_up_model()


class V2Worker(EvictionWorkerMixin, _StartsAsGPUs):
    """A worker on a CPU, whose model runner is V2."""


class V2RowsWorker(PagesInRows, V2Worker):
    """The same with pages as GPUs have them; as the GPU worker, it adds nothing to ours."""


def choose_v2() -> None:
    """Let EntropyKV run with V2 on CPUs, which it refuses."""
    from entropykv_vllm.serving import checks

    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    refusals = checks._refusals
    checks._refusals = lambda config: [
        (refused, sentence) for refused, sentence in refusals(config) if "V2" not in sentence
    ]


def allow_ahead() -> None:
    """Let vLLM plan a step while another runs, which it turns off on CPUs."""
    from vllm.platforms.cpu import CpuPlatform

    update = CpuPlatform.check_and_update_config

    def wrapper(config) -> None:
        ahead = config.scheduler_config.async_scheduling
        update(config)
        config.scheduler_config.async_scheduling = ahead

    CpuPlatform.check_and_update_config = staticmethod(wrapper)


def attend_as_gpus() -> None:
    """Give full-attention layers our backend for GPUs that stands on vLLM's Triton kernel."""
    from entropykv_vllm.attention import backends

    # vLLM's kernel that stores tokens asks for it, to choose how many it stores at a time.
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    backends._CPU = "entropykv_vllm.attention.gpu.TritonTierBackend"
