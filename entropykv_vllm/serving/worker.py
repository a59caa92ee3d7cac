# SPDX-License-Identifier: Apache-2.0
"""The worker process: layers get their tiers' specs, and moves are carried out before a step."""

from __future__ import annotations

from itertools import groupby

import torch
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
from vllm.v1.worker.cpu_worker import CPUWorker

from entropykv_vllm.config.settings import EvictionConfig
from entropykv_vllm.kernels.collapse import collapse
from entropykv_vllm.kernels.scores import SCORES
from entropykv_vllm.pages.moves import PageMove
from entropykv_vllm.pages.spec import tier_spec
from entropykv_vllm.serving import checks, seeded
from entropykv_vllm.serving.scheduler import MOVES
from entropykv_vllm.serving.settings import settings_of

logger = init_logger("vllm.entropykv")


class EvictionWorkerMixin:
    """Added to the platform's worker."""

    def __init__(self, vllm_config: VllmConfig, *args, **kwargs) -> None:
        checks.check_engine(vllm_config)
        self.eviction: EvictionConfig = settings_of(vllm_config)
        register_attention_backend()  # before the model is made: its layers ask for the backend
        super().__init__(vllm_config, *args, **kwargs)

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """vLLM's specs, with each full-attention layer's turned into its tier's."""
        specs = super().get_kv_cache_spec()
        checks.check_layers(self.vllm_config, specs)
        full = checks.full_attention_layers(self.vllm_config, specs)
        heads = checks.layer_heads(self.vllm_config, specs)
        tiers = checks.tiers_of(self.vllm_config, full, *heads)
        plan_of = {layer: tier.plan for tier in tiers for layer in tier.layers}
        for tier in tiers:
            logger.info_once("EntropyKV tier %s: layers %s, %s", *_describe(tier))
        return {
            name: tier_spec(spec, plan_of[extract_layer_index(name)])
            if checks.is_full_attention(spec)
            else spec
            for name, spec in specs.items()
        }

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        super().initialize_from_config(kv_cache_config)
        layers = self.vllm_config.compilation_config.static_forward_context
        self._group_layers = [
            [layers[name] for name in group.layer_names]
            for group in kv_cache_config.kv_cache_groups
        ]

    def execute_model(self, scheduler_output: SchedulerOutput):
        """Carry out the step's moves, then run the step."""
        moves = getattr(scheduler_output, MOVES, None)
        if moves is None:
            raise RuntimeError(
                "this worker evicts but the scheduler does not: start the server with "
                "--kv-eviction, which sets both"
            )
        self._carry_out(moves)
        return super().execute_model(scheduler_output)

    def _carry_out(self, moves: list[PageMove]) -> None:
        for batch in batches(move for move in moves if move.dst):
            self._collapse(batch)
        for move in moves:
            self._rewrite_row(move)

    def _collapse(self, batch: list[PageMove]) -> None:
        granularity, scope = self.eviction.selection
        layers = self._group_layers[batch[0].group]
        collapse(
            [layer.kv_cache for layer in layers],
            torch.tensor([move.src for move in batch]),
            torch.tensor([move.dst for move in batch]),
            score=SCORES[self.eviction.policy],
            sinks=[move.sinks for move in batch],
            isa=layers[0].isa,
            granularity=granularity,
            scope=scope,
        )

    def _rewrite_row(self, move: PageMove) -> None:
        """Put the survivors' pages and the holes into the runner's copies of the table row."""
        request = self.model_runner.requests.get(move.request_id)
        if request is None:
            return
        pages = move.dst + (0,) * (len(move.entries) - len(move.dst))
        row = self.model_runner.input_batch.req_id_to_index.get(move.request_id)
        for entry, page in zip(move.entries, pages, strict=True):
            request.block_ids[move.group][entry] = page
        if row is not None:
            table = self.model_runner.input_batch.block_table[move.group].block_table.np
            table[row, list(move.entries)] = pages


class EvictionCPUWorker(EvictionWorkerMixin, CPUWorker):
    """vLLM's CPU worker, with eviction."""

    def init_device(self) -> None:
        super().init_device()
        seeded.install(self.model_runner)


def batches(moves) -> list[list[PageMove]]:
    """Cut moves, in their order, into runs that one call may carry out together.

    A run has one group and one shape, and no move in it touches a page that an earlier one wrote:
    within a run everything is read before anything is written.
    """
    runs: list[list[PageMove]] = []
    for _, same in groupby(moves, key=lambda m: (m.group, len(m.src), len(m.dst))):
        written: set[int] = set()
        run: list[PageMove] = []
        for move in same:
            if written.intersection(move.src + move.dst):
                runs.append(run)
                run, written = [], set()
            run.append(move)
            written.update(move.dst)
        runs.append(run)
    return runs


def register_attention_backend() -> None:
    """Put our attention backend in place of vLLM's, in this process."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from entropykv_vllm.attention.cpu import EvictionCPUAttentionBackend as Backend

    register_backend(AttentionBackendEnum.CPU_ATTN, f"{Backend.__module__}.{Backend.__qualname__}")


def _describe(tier) -> tuple[str, str, str]:
    plan = tier.plan
    layers = ",".join(map(str, tier.layers))
    if not plan.compresses:
        return plan.name, layers, "everything"
    old = f"keep {plan.keep:g} in {plan.bits} bits, {plan.cold} tokens a page"
    return plan.name, layers, f"window {plan.window}, {old}"
