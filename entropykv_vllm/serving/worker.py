# SPDX-License-Identifier: Apache-2.0
"""The worker process: layers get their tiers' specs, and moves are carried out before a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import torch
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import Worker

from entropykv_vllm.attention import backends, masses
from entropykv_vllm.config import request as wishes
from entropykv_vllm.config.settings import EvictionConfig
from entropykv_vllm.kernels import hugepages, ops
from entropykv_vllm.kernels.moves import Batch, carry_out
from entropykv_vllm.kernels.scores import OBSERVED
from entropykv_vllm.pages.moves import PageMove, rewritten_rows
from entropykv_vllm.pages.spec import TierSpec, tier_spec
from entropykv_vllm.pages.waves import apart, waves
from entropykv_vllm.plan.request import AS_SERVED, Control
from entropykv_vllm.plan.schedule import TierPlan
from entropykv_vllm.serving import checks, clearing, positions, seeded
from entropykv_vllm.serving.checksums import Checksums
from entropykv_vllm.serving.origin import origin_of
from entropykv_vllm.serving.scheduler import MOVES
from entropykv_vllm.serving.settings import settings_of
from entropykv_vllm.serving.tables import TablesV1, tables_of
from entropykv_vllm.serving.view import GroupView, View

logger = init_logger("vllm.entropykv")

#: By the names of layers.
Specs = dict[str, KVCacheSpec]


@dataclass(frozen=True)
class TierLayers:
    """The caches of the layers of a page group, and their plan.

    `side` has a number for each slot that travels with its token: attention masses if the score
    reads them, or positions if the live page shows text.
    """

    plan: TierPlan
    caches: list[torch.Tensor]
    side: list[torch.Tensor | None]


class EvictionWorkerMixin:
    """Added to the platform's worker."""

    def __init__(self, vllm_config: VllmConfig, *args, **kwargs) -> None:
        checks.check_engine(vllm_config)
        self.eviction: EvictionConfig = settings_of(vllm_config)
        self._warming_up = False
        backends.register(vllm_config)
        super().__init__(vllm_config, *args, **kwargs)

    def init_device(self) -> None:
        """vLLM's; the model runner it makes is asked for specs, here and to profile CUDA graphs."""
        super().init_device()
        runner = self.model_runner
        runner.get_kv_cache_spec = partial(self._with_tiers, runner.get_kv_cache_spec)
        # Of the runner, not of this worker: one of vLLM's two executors on Ray calls it directly.
        runner.execute_model = partial(self._after_moves, runner.execute_model)

    def _with_tiers(self, get_specs: Callable[[], Specs]) -> Specs:
        """vLLM's specs, with each full-attention layer's turned into its tier's."""
        specs = get_specs()
        checks.check_layers(self.vllm_config, specs)
        full = checks.full_attention_layers(self.vllm_config, specs)
        heads = checks.layer_heads(self.vllm_config, specs)
        tiers = checks.tiers_of(self.vllm_config, full, *heads)
        plan_of = {layer: tier.plan for tier in tiers for layer in tier.layers}
        origin = origin_of(self.eviction)
        for tier in tiers:
            logger.info_once("EntropyKV tier %s: layers %s, %s", *_describe(tier))
        return {
            name: tier_spec(spec, plan_of[extract_layer_index(name)], origin)
            if checks.is_full_attention(spec)
            else spec
            for name, spec in specs.items()
        }

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        super().initialize_from_config(kv_cache_config)
        layers = self.vllm_config.compilation_config.static_forward_context
        groups = {
            i: ([layers[name] for name in group.layer_names], group.kv_cache_spec.plan)
            for i, group in enumerate(kv_cache_config.kv_cache_groups)
            if isinstance(group.kv_cache_spec, TierSpec)
        }
        numbers = positions.Tables(plan for _, plan in groups.values())
        self._tier_layers = {i: self._tier(*group, numbers) for i, group in groups.items()}
        self._tables = tables_of(self.model_runner)
        self._checksums = self._new_checksums() if self.eviction.debug else None
        self._view = View(self._group_views(kv_cache_config), self._tables.row, self._asked)
        self._report_kernels()

    def _new_checksums(self) -> Checksums | None:
        """Of V1's runner, which has the rows of requests in the system's memory."""
        if not isinstance(self._tables, TablesV1):
            logger.warning("EntropyKV's debug mode checks who owns pages here, not what they hold.")
            return None
        caches = {group: tier.caches for group, tier in self._tier_layers.items()}
        return Checksums(self.model_runner, caches)

    def _tier(self, layers: list, plan: TierPlan, numbers: positions.Tables) -> TierLayers:
        caches = [layer.kv_cache for layer in layers]
        side: list[torch.Tensor | None] = [None] * len(layers)
        if self.eviction.policy in OBSERVED:
            side = [masses.give(layer, plan) for layer in layers]
        elif positions.wanted(self.vllm_config):
            side = [numbers.of(cache) for cache in caches]
        return TierLayers(plan, caches, side)

    def _group_views(self, kv_cache_config: KVCacheConfig) -> dict[int, GroupView]:
        kept = positions.wanted(self.vllm_config)
        return {
            number: GroupView(
                tier.plan,
                [
                    extract_layer_index(n)
                    for n in kv_cache_config.kv_cache_groups[number].layer_names
                ],
                tier.caches[0].shape[1] if tier.caches else 0,
                [table for table in tier.side if kept and table is not None],
            )
            for number, tier in self._tier_layers.items()
        }

    def _asked(self, new) -> Control:
        """What a new request asks for; the scheduler serves it as others if it can't be had."""
        extra = new.sampling_params and new.sampling_params.extra_args
        try:
            return wishes.read(extra, self.eviction, new.prompt_len)
        except ValueError:
            return AS_SERVED

    def entropykv_tiers(self) -> list[dict]:
        """For the live page: `View.tiers`."""
        return self._view.tiers()

    def entropykv_look(self, chosen: dict[str, list[int]]) -> dict:
        """For the live page: `View.look`."""
        return self._view.look(chosen)

    def wake_up(self, *args, **kwargs) -> None:
        """vLLM's, after a sleep in which the memory of the pages was given away."""
        super().wake_up(*args, **kwargs)
        if self._checksums is not None:
            self._checksums.forget()

    def _report_kernels(self) -> None:
        caches = [cache for tier in self._tier_layers.values() for cache in tier.caches]
        logger.info("EntropyKV kernels: %s%s", self._kernels(), _huge_pages(caches))
        tables = [m for tier in self._tier_layers.values() for m in tier.side if m is not None]
        if tables:
            observed = self.eviction.policy in OBSERVED
            logger.info(
                "EntropyKV keeps %.1f MB of %s beside %.1f MB of pages, for %s",
                _size(tables) / 1e6,
                "attention masses" if observed else "positions",
                _size(caches) / 1e6,
                self.eviction.policy if observed else "the live page's text",
            )

    def _kernels(self) -> str:
        return ops.description()

    def compile_or_warm_up_model(self, *args, **kwargs):
        """vLLM's, which runs steps that no scheduler has planned."""
        self._warming_up = True
        try:
            return super().compile_or_warm_up_model(*args, **kwargs)
        finally:
            self._warming_up = False

    def _after_moves(self, execute_model: Callable, scheduler_output: SchedulerOutput, *args, **kw):
        """Carry out the step's moves, run the step, and note how far requests are.

        The V2 runner comes here with steps of its own too: to profile, and for ranks that idle.
        """
        if kw.get("dummy_run"):
            return execute_model(scheduler_output, *args, **kw)
        new = {request.req_id for request in scheduler_output.scheduled_new_reqs}
        moves = self._moves_of(scheduler_output)
        self._carry_out(moves, new)
        result = execute_model(scheduler_output, *args, **kw)
        if not self._warming_up:
            self._view.note(scheduler_output)
            if self._checksums is not None:
                self._checksums.check(scheduler_output, moves)
        return result

    def _moves_of(self, scheduler_output: SchedulerOutput) -> list[PageMove]:
        moves = getattr(scheduler_output, MOVES, [] if self._warming_up else None)
        if moves is None:
            raise RuntimeError(
                "this worker evicts but the scheduler does not: start the server with "
                "--kv-eviction, which sets both"
            )
        return moves

    def _carry_out(self, moves: list[PageMove], new: set[str]) -> None:
        # With pipeline stages, a group may have layers on others only.
        here = [move for move in moves if move.dst and self._tier_layers[move.group].caches]
        for alike in self._calls(here):
            self._move_pages(alike)
        self._rewrite_rows(moves, new)

    def _calls(self, moves: list[PageMove]) -> Iterator[list[PageMove]]:
        """Moves of one shape that stand together; each reads its pages before it writes."""
        return (list(alike) for _, alike in groupby(moves, key=_shape))

    def _move_pages(self, moves: list[PageMove]) -> None:
        """Carry out moves of one shape, in their order."""
        tier = self._tier_layers[moves[0].group]
        batch = _batch(moves, tier.plan.bits)
        for cache, side in zip(tier.caches, tier.side, strict=True):
            carry_out(cache, batch, self.eviction, side)

    def _rewrite_rows(self, moves: list[PageMove], new: set[str]) -> None:
        """Put the survivors' pages and the holes into the runner's copies of the table rows.

        A `new` request brings its row as it is after the moves. Another one of the same name may
        be there still, which is not to be touched.
        """
        for (request_id, group), entries in rewritten_rows(moves).items():
            if request_id not in new:
                self._tables.rewrite(request_id, group, entries)


class EvictionCPUWorker(EvictionWorkerMixin, CPUWorker):
    """vLLM's CPU worker, with eviction."""

    def init_device(self) -> None:
        super().init_device()
        seeded.install(self.model_runner)

    def load_model(self, *args, **kwargs) -> None:
        super().load_model(*args, **kwargs)
        _make_pipeline_buffer(self.model_runner)

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """vLLM's, whose runner for CPUs clears pages of plain full attention only."""
        super().initialize_from_config(kv_cache_config)
        if groups := clearing.cleared_groups(kv_cache_config):
            layers = self.vllm_config.compilation_config.static_forward_context
            names = [n for g in groups for n in kv_cache_config.kv_cache_groups[g].layer_names]
            caches = [layers[name].kv_cache for name in names]
            self.model_runner._zero_block_ids = partial(clearing.clear, caches)


class PagesInRows:
    """Added where the attention backend has pages in rows: GPUs, which move all layers at once."""

    def _calls(self, moves: list[PageMove]) -> Iterator[list[PageMove]]:
        return iter(waves(moves))

    def _move_pages(self, moves: list[PageMove]) -> None:
        from entropykv_vllm.kernels.gpu import moves as in_rows

        tier = self._tier_layers[moves[0].group]
        batch = _batch(moves, tier.plan.bits, tier.caches[0].device)
        in_rows.carry_out(tier.caches, batch, self.eviction, apart(moves))

    def _kernels(self) -> str:
        from entropykv_vllm.kernels.gpu import moves as in_rows

        return in_rows.description()


class EvictionGPUWorker(PagesInRows, EvictionWorkerMixin, Worker):
    """vLLM's GPU worker, with eviction."""

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """vLLM's, which can clear pages where it sees the need itself."""
        super().initialize_from_config(kv_cache_config)
        if clearing.cleared_groups(kv_cache_config) and not kv_cache_config.needs_kv_cache_zeroing:
            self.model_runner._init_kv_zero_meta()


#: The one for this machine; `checks` refuses platforms other than these two.
EvictionWorker = EvictionGPUWorker if current_platform.is_cuda() else EvictionCPUWorker


def _batch(moves: list[PageMove], bits: int, device: torch.device | None = None) -> Batch:
    """Moves of one shape as tensors, on their way to a device if there is one."""
    away = device is not None and device.type == "cuda"
    src, dst, sinks = (
        torch.tensor([getattr(move, name) for move in moves], pin_memory=away)
        for name in ("src", "dst", "sinks")
    )
    if away:
        src, dst, sinks = (x.to(device, non_blocking=True) for x in (src, dst, sinks))
    return Batch(moves[0].kind, bits, src, dst, sinks)


def _make_pipeline_buffer(runner) -> None:
    """Make what a later pipeline stage takes its input in.

    vLLM makes it when it warms up, which it does not do on CPUs with --enforce-eager: the first
    request would stop the engine.
    """
    from vllm.distributed.parallel_state import get_pp_group

    if not get_pp_group().is_first_rank and runner.intermediate_tensors is None:
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.dtype, device=runner.device
        )


def _huge_pages(caches: list[torch.Tensor]) -> str:
    """Ask for huge pages under caches in the system's memory; what a log line says of it."""
    storages = {cache.untyped_storage().data_ptr(): cache for cache in caches if cache.is_cpu}
    if not storages:
        return ""
    given = [hugepages.advise(cache) for cache in storages.values()]
    return f"; huge pages for the KV cache: {'yes' if all(given) else 'no, the system gave none'}"


def _size(tensors: list[torch.Tensor]) -> int:
    """Bytes of tensors, of which some may lie in the same memory."""
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())


def _shape(move: PageMove) -> tuple[int, str, int, int]:
    return move.group, move.kind, len(move.src), len(move.dst)


def _describe(tier) -> tuple[str, str, str]:
    plan = tier.plan
    layers = ",".join(map(str, tier.layers))
    if not plan.compresses:
        return plan.name, layers, "everything"
    share = "all" if plan.keep == 1 else f"{plan.keep:g}"
    old = f"keep {share} in {plan.bits} bits, {plan.cold} tokens a page"
    return plan.name, layers, f"window {plan.window}, {old}"
