# SPDX-License-Identifier: Apache-2.0
"""A clock for the parts of an engine's step, in the engine's own thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

#: Processor time of the thread does not count what else runs on the machine.
CLOCKS: dict[str, Callable[[], float]] = {
    "processor": time.thread_time,
    "wall": time.perf_counter,
}

#: Where the planner has a hand in, or may make vLLM slower.
PLANNER = ("schedule", "rows", "metadata", "runner", "update", "statistics")
#: All that is timed; what is left of a step is its "rest".
PARTS = (*PLANNER, "moves", "model", "sampling")


class Parts:
    """Adds up the seconds of named functions, each without those that it calls."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self._spent = dict.fromkeys(PARTS, 0.0)
        self._inside = [0.0]

    def on(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, timed as a part."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = self.now()
            self._inside.append(0.0)
            try:
                return function(*args, **kwargs)
            finally:
                took = self.now() - start
                self._spent[name] += took - self._inside.pop()
                self._inside[-1] += took

        return timed

    def of(self, step: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
        """Take a step; what it returns, and the seconds of its parts, the rest and the whole."""
        self._spent = dict.fromkeys(PARTS, 0.0)
        start = self.now()
        result = step()
        whole = self.now() - start
        rest = whole - sum(self._spent.values())
        return result, {**self._spent, "rest": rest, "step": whole}


def watch(llm: Any, parts: Parts) -> None:
    """Time the parts of an engine that runs in this process, with our plugin or without."""
    core = llm.llm_engine.engine_core.engine_core
    worker = core.model_executor.driver_worker.worker
    runner = worker.model_runner
    builders = [
        builder
        for groups in runner.attn_groups
        for group in groups
        for builder in group.metadata_builders
    ]
    timed = [
        (core.scheduler, "schedule", "schedule"),
        (core.scheduler, "update_from_output", "update"),
        (core.scheduler, "make_stats", "statistics"),
        (runner, "execute_model", "runner"),
        (runner, "_model_forward", "model"),
        (runner.model, "compute_logits", "model"),
        (runner, "sample_tokens", "sampling"),
        *((builder, "build", "metadata") for builder in builders),
    ]
    if hasattr(worker, "_carry_out"):
        from entropykv_vllm.serving import worker as module

        timed += [(worker, "_carry_out", "rows"), (module, "carry_out", "moves")]
    for owner, method, name in timed:
        setattr(owner, method, parts.on(name, getattr(owner, method)))
