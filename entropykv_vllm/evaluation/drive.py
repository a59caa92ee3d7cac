# SPDX-License-Identifier: Apache-2.0
"""Runs prompts through an engine step by step, reading vLLM's gauges after each step."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Sample:
    """The engine after one step."""

    seconds: float  # since the requests were handed in
    running: int
    waiting: int  # handed in, but not running: new or preempted
    answering: int  # requests that got a token in this step, so their whole prompts are held
    used: float  # share of the pool's pages in use


def metrics(llm: Any) -> dict[str, float]:
    """Return the engine's gauges and counters by name; several of one name are added up."""
    values: dict[str, float] = {}
    for metric in llm.get_metrics():
        if hasattr(metric, "value"):
            values[metric.name] = values.get(metric.name, 0) + metric.value
    return values


def run(
    llm: Any,
    prompts: list[list[int]],
    params: Any,
    prefix: str = "request",
    done: Callable[[int], None] = lambda count: None,
) -> tuple[list[Any], list[Sample]]:
    """Run token prompts to their end; return vLLM's outputs in their order, and the samples."""
    engine = llm.llm_engine
    start, finished = time.monotonic(), 0
    for i, ids in enumerate(prompts):
        engine.add_request(f"{prefix}-{i}", {"prompt_token_ids": ids}, params)
    outputs: dict[str, Any] = {}
    samples: list[Sample] = []
    while engine.has_unfinished_requests():
        stepped = engine.step()
        outputs.update((out.request_id, out) for out in stepped if out.finished)
        unfinished = len(prompts) - len(outputs)
        samples.append(_sample(llm, time.monotonic() - start, unfinished, len(stepped)))
        if len(outputs) > finished:
            done(finished := len(outputs))
    return [outputs[f"{prefix}-{i}"] for i in range(len(prompts))], samples


def _sample(llm: Any, seconds: float, unfinished: int, answering: int) -> Sample:
    now = metrics(llm)
    running = int(now["vllm:num_requests_running"])
    # Not vLLM's own gauge, which misses requests that have not reached its scheduler yet.
    waiting = max(0, unfinished - running)
    return Sample(seconds, running, waiting, answering, now["vllm:kv_cache_usage_perc"])
