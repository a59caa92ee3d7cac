# SPDX-License-Identifier: Apache-2.0
"""One run of the decode benchmark: one batch under one setting. Run by `decode_bench`."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

from entropykv_vllm.evaluation import cells, drive, dummy, engines, step_profile

WARM_UP_TOKENS = 1024  # long enough that pages are moved
WARM_UP_STEPS = 4
PROFILED_STEPS = 8  # after those that are timed


class Stopwatch:
    """Adds up the seconds that are spent in a function."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def on(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, timed."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - start

        return timed


def watch_moves(watch: Stopwatch) -> None:
    """Time the page moves of workers, which run in this process."""
    from entropykv_vllm.serving.worker import EvictionWorkerMixin as Worker

    Worker._carry_out = watch.on(Worker._carry_out)  # type: ignore[method-assign]


def read(engine: Any, batch: int) -> float:
    """Step until each request has answered; return the seconds."""
    start = time.perf_counter()
    answered: set[str] = set()
    while len(answered) < batch:
        answered.update(out.request_id for out in engine.step())
    return time.perf_counter() - start


def decode(engine: Any, batch: int, steps: int) -> list[float]:
    """Return the seconds of each step after the first few.

    Raises:
        RuntimeError: if a request did not get its token in a step, as it waits or has ended.
    """
    seconds: list[float] = []
    for _ in range(WARM_UP_STEPS + steps):
        start = time.perf_counter()
        outputs = engine.step()
        seconds.append(time.perf_counter() - start)
        if len(outputs) != batch or any(out.finished for out in outputs):
            raise RuntimeError(f"only {len(outputs)} of {batch} requests decode: enlarge the pool")
    return seconds[WARM_UP_STEPS:]


def summary(
    batch: int, reading: float, moving: float, steps: list[float], moving_steps: float
) -> dict[str, Any]:
    """Return the values of a cell; `moving` seconds are parts of the others."""
    step = statistics.median(steps)
    return {
        "tokens/s": batch / step,
        "step seconds": step,
        "mean tokens/s": batch * len(steps) / sum(steps),  # with the steps that move pages
        "reading seconds": reading,
        "moving seconds": moving,
        "moving share": moving / reading,
        "moving seconds of decoding": moving_steps,
        "seconds of each step": steps,
    }


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    """Read all prompts, then time the steps that decode."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # steps and moves are timed in one process
    from vllm import SamplingParams

    watch, batch = Stopwatch(), spec["batch"]
    if spec["policy"] != "none":
        watch_moves(watch)
    llm = engines.make(spec)
    engine, vocabulary = llm.llm_engine, spec["config"]["vocab_size"]
    params = {"temperature": 0, "ignore_eos": True, "detokenize": False}
    warm = dummy.prompts(1, min(WARM_UP_TOKENS, spec["tokens"]), vocabulary, seed=1)
    drive.run(llm, warm, SamplingParams(**params, max_tokens=8), "warm-up")
    endless = SamplingParams(**params, max_tokens=spec["engine"]["max_model_len"] - spec["tokens"])
    for i, ids in enumerate(dummy.prompts(batch, spec["tokens"], vocabulary)):
        engine.add_request(f"request-{i}", {"prompt_token_ids": ids}, endless)
    watch.seconds = 0.0
    reading = read(engine, batch)
    moving, watch.seconds = watch.seconds, 0.0
    steps = decode(engine, batch, spec["steps"])
    used = drive.metrics(llm)["vllm:kv_cache_usage_perc"]
    found = {**summary(batch, reading, moving, steps, watch.seconds), "pool used": used}
    if spec.get("profile"):
        found["parts"] = step_profile.of(engine.step, PROFILED_STEPS)
    return found


if __name__ == "__main__":
    cells.main(measure)
