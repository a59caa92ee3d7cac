# SPDX-License-Identifier: Apache-2.0
"""vLLM's own scheduler over our page managers, without a model, and what it does at each step."""

from __future__ import annotations

import copy
import functools
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from entropykv_vllm.config.settings import CONFIG_KEY, load
from entropykv_vllm.plan.pool import Pool
from entropykv_vllm.simulation.job import Job
from entropykv_vllm.simulation.memory import Memory
from entropykv_vllm.simulation.replica import Replica

from ..engine.run_runner import LLAMA as SMALL

MAX_LEN = 4096
LLAMA = {**SMALL, "max_position_embeddings": MAX_LEN}


@dataclass(frozen=True)
class Asked:
    """A request: when it comes, in steps, its prompt, and the tokens that a model would answer."""

    step: int
    prompt: tuple[int, ...]
    answer: tuple[int, ...]


@dataclass
class Seen:
    """All that can be seen of a step from outside, requests by their number."""

    tokens: list[tuple[int, int]]
    admitted: list[tuple[int, int]]
    preempted: list[int]
    held: dict[int, list[int]]
    free: int
    finished: list[int] = field(default_factory=list)
    free_after: int = -1


@dataclass(frozen=True)
class Server:
    """What both have in common.

    Attributes:
        plan: the tables.
        pages: of the pool, the null page not counted.
        ahead: whether a step is planned while another runs.
        in_flight: the most tokens of the steps under way that vLLM counts with, if not those.
        longest: the most tokens of a request.
        priority: whether requests have priorities, and are not served as they come.
    """

    plan: Pool
    pages: int
    step_tokens: int
    requests: int
    interval: int | None
    caching: bool = True
    ahead: bool = False
    in_flight: int | None = None
    longest: int = MAX_LEN
    priority: bool = False


def replayed(server: Server, asked: Sequence[Asked], limit: int = 5000) -> list[Seen]:
    """What the simulation does."""
    in_flight = server.in_flight or server.step_tokens * (2 if server.ahead else 1)
    memory = Memory(server.plan, server.pages, server.caching, in_flight, server.ahead)
    replica = Replica(memory, server.step_tokens, server.requests, server.interval, server.ahead)
    jobs = [_job(number, request, memory.page) for number, request in enumerate(asked)]
    seen: list[Seen] = []
    under_way = []
    for turn in range(limit):
        for job, request in zip(jobs, asked, strict=True):
            if request.step == turn:
                replica.add(job)
        step = replica.schedule()
        if step.tokens or step.preempted:
            seen.append(
                Seen(
                    [(job.number, count) for job, count in step.tokens],
                    [(job.number, hit) for job, hit in step.admitted],
                    [job.number for job in step.preempted],
                    {job.number: [row.held for row in job.rows] for job in replica.running},
                    memory.pool.free,
                )
            )
        under_way.append((step, seen[-1] if step.tokens else None))
        if len(under_way) > server.ahead:
            done, record = under_way.pop(0)
            ended = replica.finish(done)
            if record is not None:
                record.finished = [job.number for job in ended]
                record.free_after = memory.pool.free
        if all(request.step <= turn for request in asked) and not replica.load:
            return seen
    raise AssertionError("the simulation does not end")


def _job(number: int, asked: Asked, page: int) -> Job:
    """The names of its pages are all tokens before their end."""
    tokens = asked.prompt + asked.answer
    names = [tokens[:end] for end in range(page, len(tokens) + 1, page)]
    return Job(number, len(asked.prompt), len(tokens), names)


@functools.cache
def _config():
    from vllm.engine.arg_utils import EngineArgs

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(LLAMA))
        return EngineArgs(
            model=folder, skip_tokenizer_init=True, load_format="dummy", max_model_len=MAX_LEN
        ).create_engine_config()


def _groups(plan: Pool, origin) -> list:
    """vLLM's page groups with our tiers, those of a planned pool."""
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec, SlidingWindowSpec

    from entropykv_vllm.pages.spec import TierSpec
    from entropykv_vllm.plan.pool import Evicted, Sliding

    groups = []
    for i, table in enumerate(plan.tables):
        size = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
        if isinstance(table, Evicted):
            page = table.plan.page
            spec = TierSpec(block_size=page, plan=table.plan, origin=origin, **size)
        elif isinstance(table, Sliding):
            spec = SlidingWindowSpec(block_size=table.page, sliding_window=table.window, **size)
        else:
            spec = FullAttentionSpec(block_size=table.page, **size)
        groups.append(KVCacheGroupSpec([f"layers.{i}"], spec))
    return groups


def make_scheduler(server: Server):
    """vLLM's scheduler, with ours on top where there are tiers."""
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import init_none_hash
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.structured_output import StructuredOutputManager

    from entropykv_vllm.serving.origin import origin_of
    from entropykv_vllm.serving.scheduler import EvictionAsyncScheduler, EvictionScheduler

    init_none_hash(sha256)
    config, settings = copy.deepcopy(_config()), load("entropykv", None)
    config.additional_config = {CONFIG_KEY: settings.model_dump(mode="json")}
    groups = _groups(server.plan, origin_of(settings))
    page = groups[0].kv_cache_spec.block_size
    config.scheduler_config.max_num_batched_tokens = server.step_tokens
    config.scheduler_config.max_num_scheduled_tokens = server.step_tokens
    config.scheduler_config.max_num_seqs = server.requests
    config.scheduler_config.async_scheduling = server.ahead
    config.scheduler_config.policy = "priority" if server.priority else "fcfs"
    config.model_config.max_model_len = server.longest
    config.cache_config.enable_prefix_caching = server.caching
    config.cache_config.block_size = page
    config.cache_config.num_gpu_blocks = server.pages + 1
    kinds = {
        (False, False): Scheduler,
        (False, True): AsyncScheduler,
        (True, False): EvictionScheduler,
        (True, True): EvictionAsyncScheduler,
    }
    return kinds[server.interval is not None, server.ahead](
        config,
        KVCacheConfig(
            num_blocks=server.pages + 1,
            kv_cache_tensors=[],
            kv_cache_groups=groups,
            prefix_cache_retention_interval=config.cache_config.prefix_cache_retention_interval,
        ),
        StructuredOutputManager(config),
        block_size=page,
    )


class Watched:
    """What a scheduler of vLLM does from now on."""

    def __init__(self, scheduler) -> None:
        self.scheduler = scheduler
        manager = scheduler.kv_cache_manager
        self.pool, self.tables = manager.block_pool, manager.coordinator.single_type_managers
        self.seen: list[Seen] = []
        self._preempted: list[int] = []
        self._under_way: list[tuple[list[str], Seen]] = []
        for name in ("_preempt_request", "schedule", "update_from_output"):
            setattr(scheduler, name, self._wrap(name, getattr(scheduler, name)))

    def _wrap(self, name: str, method):
        note = getattr(self, f"_note{name if name[0] == '_' else '_' + name}")

        def wrapper(*args, **kwargs):
            before = [request.request_id for request in self.scheduler.running]
            result = method(*args, **kwargs)
            note(before, result, *args)
            return result

        return wrapper

    def _note_preempt_request(self, before, result, request, *args) -> None:
        self._preempted.append(number_of(request.request_id))

    def _note_schedule(self, before, output, *args) -> None:
        counts, requests = output.num_scheduled_tokens, self.scheduler.requests
        preempted, self._preempted = self._preempted, []
        if not counts and not preempted:
            return
        admitted = [
            (number_of(name), requests[name].num_computed_tokens - count)
            for name, count in counts.items()
            if name not in before
        ]
        seen = Seen(
            [(number_of(name), count) for name, count in counts.items()],
            admitted,
            preempted,
            {number_of(r.request_id): self._held(r) for r in self.scheduler.running},
            self.pool.get_num_free_blocks(),
        )
        self.seen.append(seen)
        if counts:
            self._under_way.append((list(counts), seen))

    def _note_update_from_output(self, before, result, output, *args) -> None:
        if not output.num_scheduled_tokens:
            return
        names, seen = self._under_way.pop(0)
        seen.finished = [number_of(name) for name in names if name not in self.scheduler.requests]
        seen.free_after = self.pool.get_num_free_blocks()

    def _held(self, request) -> list[int]:
        rows = [table.req_to_blocks[request.request_id] for table in self.tables]
        return [sum(not block.is_null for block in row) for row in rows]


def number_of(request_id: str) -> int:
    return int(request_id.split("-")[0].removeprefix("r"))


def scheduled(server: Server, asked: Sequence[Asked], limit: int = 5000) -> list[Seen]:
    """What vLLM's scheduler does, with a model that answers what is asked for."""
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

    watched = Watched(make_scheduler(server))
    scheduler = watched.scheduler
    hasher = get_request_block_hasher(scheduler.hash_block_size, sha256)
    under_way = []
    for turn in range(limit):
        for number, one in enumerate(asked):
            if one.step == turn:
                params = SamplingParams(max_tokens=len(one.answer), ignore_eos=True)
                scheduler.add_request(
                    Request(f"r{number}", list(one.prompt), params, None, block_hasher=hasher)
                )
        output = scheduler.schedule()
        names = list(output.num_scheduled_tokens)
        tokens = [_sampled(scheduler.requests[name], asked) for name in names]
        places = {name: i for i, name in enumerate(names)}
        under_way.append((output, ModelRunnerOutput(names, places, tokens)))
        if len(under_way) > server.ahead:
            scheduler.update_from_output(*under_way.pop(0))
        if all(one.step <= turn for one in asked) and not scheduler.has_unfinished_requests():
            return watched.seen
    raise AssertionError("vLLM does not end")


def _sampled(request, asked: Sequence[Asked]) -> list[int]:
    """The token that a model gives once it has read all there is, and none before."""
    own = asked[number_of(request.request_id)]
    place = request.num_computed_tokens - len(own.prompt)
    known = request.num_tokens + max(0, request.num_output_placeholders - 1)
    return [own.answer[place]] if request.num_computed_tokens == known else []
