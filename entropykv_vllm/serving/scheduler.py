# SPDX-License-Identifier: Apache-2.0
"""The scheduler process: steps end at boundaries, and the step's moves travel with it."""

from __future__ import annotations

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.request import Request, RequestStatus

from entropykv_vllm.pages.manager import TierManager
from entropykv_vllm.plan.schedule import next_boundary
from entropykv_vllm.serving import clearing
from entropykv_vllm.serving.checks import check_groups
from entropykv_vllm.serving.metrics import pack

#: The attribute of a `SchedulerOutput` that carries the step's moves.
MOVES = "entropykv_moves"


class EvictionSchedulerMixin:
    """Added to vLLM's schedulers."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        check_groups(self.vllm_config, self.kv_cache_config)
        managers = self.kv_cache_manager.coordinator.single_type_managers
        self._tiers = [manager for manager in managers if isinstance(manager, TierManager)]
        self._interval = self._tiers[0].plan.interval
        clearing.ask_for(self, managers)
        # vLLM asks a scheduler of Mamba models where to end a step; we use the same question.
        self._splits_for_mamba = self.need_mamba_block_aligned_split
        self.need_mamba_block_aligned_split = True

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
        start = (
            request.num_computed_tokens
            + num_new_local_computed_tokens
            + num_external_computed_tokens
        )
        running = request.status == RequestStatus.RUNNING
        if running and start % self._interval == 0 and request.num_in_flight_tokens > 0:
            return 0
        return min(num_new_tokens, next_boundary(self._interval, start) - start)

    def schedule(self, *args, **kwargs) -> SchedulerOutput:
        output = super().schedule(*args, **kwargs)
        moves = [move for tier in self._tiers for move in tier.take_moves()]
        moves.sort(key=lambda move: move.order)
        setattr(output, MOVES, moves)
        fresh = clearing.without_survivors(output.new_block_ids_to_zero, moves)
        output.new_block_ids_to_zero = fresh
        return output

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
