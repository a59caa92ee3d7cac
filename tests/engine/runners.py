# SPDX-License-Identifier: Apache-2.0
"""vLLM's V2 model runner without a GPU, and engines whose steps overlap there; for processes of
their own, since it changes vLLM.

vLLM has a V2 runner for CPUs, for builds of Triton that this one is not: Triton's interpreter takes
their place. The attention of GPUs can run on it as well: our backend over vLLM's kernel.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from types import ModuleType

from vllm.v1.worker.cpu_worker import CPUWorker

from entropykv_vllm.serving.worker import EvictionWorkerMixin

NAME = "tests.engine.runners.V2Worker"


class V2Worker(EvictionWorkerMixin, CPUWorker):
    """A worker on a CPU, whose model runner is V2; as the GPU worker, it adds nothing to ours."""


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


def attend_as_gpus(kernels: str) -> None:
    """Give full-attention layers our backend for GPUs that stands on vLLM's Triton kernel.

    Args:
        kernels: ours, where pages are quantized: "triton", or "reference" for plain torch.
    """
    from entropykv_vllm.attention import backends
    from entropykv_vllm.kernels import moves, reference

    in_rows = {op: partial(getattr(reference, op), order="rows") for op in ("collapse", "drop")}
    moves.ops = type("Rows", (), {name: staticmethod(op) for name, op in in_rows.items()})
    if kernels == "reference":
        stand_in = ModuleType("entropykv_vllm.kernels.gpu")
        stand_in.attention = _attention
        sys.modules[stand_in.__name__] = stand_in
    backends._CPU = "entropykv_vllm.attention.gpu.TritonTierBackend"


def _attention(*args, max_query: int) -> None:
    from entropykv_vllm.kernels import reference

    reference.attention(*args, order="rows")
