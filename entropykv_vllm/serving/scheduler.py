# SPDX-License-Identifier: Apache-2.0
"""The scheduler process: steps end at boundaries, and the step's moves travel with it."""

from __future__ import annotations

import multiprocessing
from math import ceil

from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.request import Request, RequestStatus, StreamingUpdate

from entropykv_vllm.config import request as wishes
from entropykv_vllm.lifeline import end_with_parent
from entropykv_vllm.pages.audit import audit
from entropykv_vllm.pages.control import control, control_of, release
from entropykv_vllm.pages.manager import TierManager
from entropykv_vllm.plan.pool import longest
from entropykv_vllm.plan.request import AS_SERVED, Control, request_plan
from entropykv_vllm.plan.schedule import peak_pages
from entropykv_vllm.serving import clearing
from entropykv_vllm.serving.checks import check_groups
from entropykv_vllm.serving.metrics import pack
from entropykv_vllm.serving.settings import settings_of

logger = init_logger("vllm.entropykv")

#: The attribute of a `SchedulerOutput` that carries the step's moves.
MOVES = "entropykv_moves"
#: What vLLM calls the processes that it starts for engine cores.
ENGINE_CORE = "EngineCore"


class EvictionSchedulerMixin:
    """Added to vLLM's schedulers."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        # vLLM's engine core would go on for ever, with all memory, if its server were killed.
        if multiprocessing.current_process().name.startswith(ENGINE_CORE):
            end_with_parent()
        check_groups(self.vllm_config, self.kv_cache_config)
        managers = self.kv_cache_manager.coordinator.single_type_managers
        self._settings = settings_of(self.vllm_config)
        self._audits = self._settings.debug
        self._tiers = [manager for manager in managers if isinstance(manager, TierManager)]
        self._others = [manager for manager in managers if not isinstance(manager, TierManager)]
        for tier in self._tiers:
            tier.requests = self.requests
        self._interval = self._tiers[0].plan.interval
        clearing.ask_for(self, managers)
        # vLLM asks a scheduler of Mamba models where to end a step; we use the same question.
        self._splits_for_mamba = self.need_mamba_block_aligned_split
        self.need_mamba_block_aligned_split = True

    def add_request(self, request: Request) -> None:
        """vLLM's; a request may ask for something of its own.

        Workers read wishes too, for the live page: they are to find those that are granted.
        """
        params, new = request.sampling_params, request.request_id not in self.requests
        if new and params and wishes.asked(params.extra_args) and not self._control(request):
            params.extra_args = wishes.without(params.extra_args)
        super().add_request(request)

    def _control(self, request: Request) -> bool:
        """Give a new request what it asks for, as far as there are pages.

        Servers have refused before what cannot be had (`serving.requests`). What still comes is
        served as any other request: one that waits for pages that never come would stop all.

        Returns:
            Whether it gets what it asks for.
        """
        asked = self._asked(request)
        if asked == AS_SERVED:
            return False
        if not self._fits(request, asked):
            logger.warning("Request %s is too long for what it asks for.", request.request_id)
            return False
        control(request, asked, self.kv_cache_manager.block_pool.hash_block_size)
        return True

    def _update_request_as_session(self, session: Request, update: StreamingUpdate) -> None:
        """vLLM's; a session that outgrows the pages there are for what it asked for starts anew."""
        super()._update_request_as_session(session, update)
        asked = control_of(session)
        if asked == AS_SERVED or self._fits(session, asked):
            return
        logger.warning("Request %s became too long for what it asks for.", session.request_id)
        self.kv_cache_manager.free(session)
        session.num_computed_tokens = 0
        # As one that was preempted: the workers must not keep its place in the batch.
        self.reset_preempted_req_ids.add(session.request_id)
        release(session)

    def _fits(self, request: Request, asked: Control) -> bool:
        """Whether a prompt fits as it asks to be kept; its answer then ends where the pool does."""
        prompt = request.num_prompt_tokens
        room = self._room(asked, prompt + request.max_tokens)
        if room > prompt:
            request.max_tokens = min(request.max_tokens, room - prompt)
        return room > prompt

    def _asked(self, request: Request) -> Control:
        extra = request.sampling_params and request.sampling_params.extra_args
        try:
            return wishes.read(extra, self._settings, request.num_prompt_tokens)
        except ValueError as error:
            logger.warning("Request %s is served as others are: %s", request.request_id, error)
            return AS_SERVED

    def _room(self, asked: Control, tokens: int) -> int:
        """The longest that a request of at most `tokens` tokens may become.

        Engines are handed larger numbers of tokens to answer than any request may have.
        """
        tokens = min(tokens, self.max_model_len)
        plans = [request_plan(tier.plan, asked) for tier in self._tiers]
        specs = [manager.kv_cache_spec for manager in self._others]
        others = [
            ceil(spec.max_memory_usage_bytes(self.vllm_config) / spec.page_size_bytes)
            for spec in specs
        ]
        manager = self.kv_cache_manager
        usable = manager.block_pool.num_gpu_blocks - 1 - manager.watermark_blocks - sum(others)

        def peak(length: int) -> int:
            return sum(peak_pages(plan, length) for plan in plans)

        return tokens if peak(tokens) <= usable else longest(peak, usable, tokens)

    def _mamba_block_aligned_split(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_local_computed_tokens: int = 0,
        num_external_computed_tokens: int = 0,
    ) -> int:
        """End the step at the next boundary, so that what a token sees depends on it alone.

        A request that stands at a boundary waits until its steps in flight are finished, since
        pages are moved on finished tokens only.
        """
        if self._splits_for_mamba:
            num_new_tokens = super()._mamba_block_aligned_split(
                request, num_new_tokens, num_new_local_computed_tokens, num_external_computed_tokens
            )
        into = (
            request.num_computed_tokens
            + num_new_local_computed_tokens
            + num_external_computed_tokens
        ) % self._interval
        at_boundary = into == 0 and request.status == RequestStatus.RUNNING
        if at_boundary and request.num_in_flight_tokens > 0:
            return 0
        return min(num_new_tokens, self._interval - into)

    def schedule(self, *args, **kwargs) -> SchedulerOutput:
        output = super().schedule(*args, **kwargs)
        moves = [move for tier in self._tiers for move in tier.take_moves()]
        moves.sort(key=lambda move: move.order)
        setattr(output, MOVES, moves)
        fresh = clearing.without_survivors(output.new_block_ids_to_zero, moves)
        output.new_block_ids_to_zero = fresh
        if self._audits:
            self._audit()
        return output

    def _audit(self) -> None:
        deferred = [block for _, blocks in self.deferred_frees for block in blocks]
        managers = self.kv_cache_manager.coordinator.single_type_managers
        audit(self.kv_cache_manager.block_pool, managers, deferred)

    def make_stats(self, *args, **kwargs) -> SchedulerStats | None:
        stats = super().make_stats(*args, **kwargs)
        if stats is not None:
            pack(stats, [(tier.plan.name, tier.take_counts()) for tier in self._tiers])
        return stats


class EvictionScheduler(EvictionSchedulerMixin, Scheduler):
    """vLLM's scheduler, with eviction."""


class EvictionAsyncScheduler(EvictionSchedulerMixin, AsyncScheduler):
    """vLLM's scheduler that plans a step while the one before it runs, with eviction."""


def scheduler(vllm_config, *args, **kwargs) -> Scheduler:
    """The scheduler that fits: vLLM decides late whether it schedules ahead.

    vLLM resolves `--scheduler-cls` by name and calls what it finds, so a function serves.
    """
    ahead = vllm_config.scheduler_config.async_scheduling
    kind = EvictionAsyncScheduler if ahead else EvictionScheduler
    return kind(vllm_config, *args, **kwargs)
