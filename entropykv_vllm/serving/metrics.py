# SPDX-License-Identifier: Apache-2.0
"""Counts of each tier, on their way from the scheduler to `/metrics` and the periodic log."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import partial

from prometheus_client import REGISTRY, Counter, Gauge
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.metrics.stats import SchedulerStats

from entropykv_vllm.page.history import HISTORY
from entropykv_vllm.pages.manager import TierCounts
from entropykv_vllm.serving.settings import evicts

logger = init_logger("vllm.entropykv")

#: `SchedulerStats` has no place for a plugin's counts, and only its declared fields cross from
#: the engine process to the server; this mapping of strings to numbers is one of them.
_CARRIER = "waiting_lora_adapters"
_PREFIX = "entropykv/"

_GAUGES = {
    "hot": "Pages held with the newest tokens.",
    "cold": "Pages held with surviving old tokens.",
}
_COUNTERS = {
    "freed": ("pages_freed", "Pages given back to the pool by eviction."),
    "tokens_evicted": ("tokens_evicted", "Tokens evicted, per layer and KV head."),
    "collapses": ("collapses", "Segments collapsed into their surviving tokens."),
    "copies": ("copy_on_writes", "Collapses into fresh pages, so that old ones serve prefix hits."),
}


def pack(stats: SchedulerStats, tiers: Iterable[tuple[str, TierCounts]]) -> None:
    """Put the counts of each tier into `stats`; groups of one tier are added up."""
    carrier = getattr(stats, _CARRIER)
    for name, counts in tiers:
        for field, value in vars(counts).items():
            key = f"{_PREFIX}{name}/{field}"
            carrier[key] = carrier.get(key, 0) + value


def unpack(stats: SchedulerStats) -> dict[str, dict[str, int]]:
    """Take the counts out of `stats` again: tier -> field -> number."""
    carrier = getattr(stats, _CARRIER)
    tiers: dict[str, dict[str, int]] = {}
    for key in [key for key in carrier if key.startswith(_PREFIX)]:
        name, _, field = key.removeprefix(_PREFIX).rpartition("/")
        tiers.setdefault(name, {})[field] = carrier.pop(key)
    return tiers


#: By engine of this process: how many times its pool the requests ask for.
_DEMAND: dict[int, float] = {}


def demand() -> float:
    """How many times the pages of this process's engines the requests ask for.

    It is the share of the pages that running requests hold; each waiting one counts as much as a
    running one does on average. Engines have pools of one size.
    """
    return sum(_DEMAND.values()) / max(1, len(_DEMAND))


def _demand(stats: SchedulerStats) -> float:
    waiting = stats.num_waiting_reqs
    if not stats.num_running_reqs:
        return float(waiting > 0)
    return stats.kv_cache_usage * (1 + waiting / stats.num_running_reqs)


class EvictionStatLogger(StatLoggerBase):
    """Feeds Prometheus and adds a line to vLLM's periodic log."""

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        self.on = evicts(vllm_config)
        self.labels = (vllm_config.model_config.served_model_name, str(engine_index))
        self.freed = 0
        self.held: dict[str, dict[str, int]] = {}
        self.metrics: tuple[dict[str, Gauge], dict[str, Counter]] | None = None

    def record(self, scheduler_stats, iteration_stats, mm_cache_stats=None, engine_idx=0) -> None:
        if not self.on or scheduler_stats is None:
            return
        _DEMAND[engine_idx] = _demand(scheduler_stats)
        # Not made in __init__: vLLM's own logger, made later, drops all metrics named vllm:*.
        self.metrics = self.metrics or _metrics()
        gauges, counters = self.metrics
        tiers = unpack(scheduler_stats)
        preempted = iteration_stats.num_preempted_reqs if iteration_stats is not None else 0
        HISTORY.add(engine_idx, scheduler_stats, tiers, preempted)
        for name, counts in tiers.items():
            self.held[name] = counts
            self.freed += counts["freed"]
            for field, gauge in gauges.items():
                gauge.labels(*self.labels, name, field).set(counts[field])
            for field, counter in counters.items():
                counter.labels(*self.labels, name).inc(counts[field])

    def log(self) -> None:
        if self.held and (self.freed or any(c["hot"] for c in self.held.values())):
            tiers = ", ".join(f"{n} {c['hot']}+{c['cold']}" for n, c in self.held.items())
            logger.info("EntropyKV: pages held, hot+cold: %s; freed: %d", tiers, self.freed)
            self.freed = 0

    def log_engine_initialized(self) -> None:
        pass


def _in_ray_serve() -> bool:
    """Does this process run a replica, whose metrics Ray collects?"""
    from vllm.v1.metrics import ray_wrappers

    return "ray" in sys.modules and ray_wrappers._get_replica_id() is not None


def _kinds() -> tuple[Callable, Callable]:
    """What makes a gauge, and a counter, that somebody reads."""
    if _in_ray_serve():
        from vllm.v1.metrics.ray_wrappers import RayCounterWrapper, RayGaugeWrapper

        return RayGaugeWrapper, RayCounterWrapper
    return partial(_once, Gauge), partial(_once, Counter)


def _metrics() -> tuple[dict[str, Gauge], dict[str, Counter]]:
    """The metrics of this process, made once: several engines share them."""
    labels = ["model_name", "engine", "tier"]
    gauge, counter = _kinds()
    pages = gauge(
        "vllm:entropykv_pages",
        "KV cache pages held by requests, by kind.",
        [*labels, "kind"],
        multiprocess_mode="mostrecent",
    )
    counters = {
        field: counter(f"vllm:entropykv_{name}", text, labels)
        for field, (name, text) in _COUNTERS.items()
    }
    return dict.fromkeys(_GAUGES, pages), counters


def _once(kind, name: str, text: str, labels: list[str], **options):
    known = REGISTRY._names_to_collectors.get(name)
    return known if known is not None else kind(name, text, labels, **options)


def attach(llm) -> None:
    """Feed the metrics of an offline `vllm.LLM`, so that `llm.get_metrics()` has them.

    vLLM loads statistics plugins in its server only. The `LLM` must be made with
    ``disable_log_stats=False``.
    """
    manager = llm.llm_engine.logger_manager
    if manager is None:
        raise ValueError("make the LLM with disable_log_stats=False to have metrics")
    manager.stat_loggers.insert(0, EvictionStatLogger(llm.llm_engine.vllm_config))
