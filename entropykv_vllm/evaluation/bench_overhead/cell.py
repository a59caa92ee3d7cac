# SPDX-License-Identifier: Apache-2.0
"""One run: some requests decode under one setting, and the parts of each step are timed."""

from __future__ import annotations

import cProfile
import os
import random
from collections.abc import Callable
from typing import Any

from entropykv_vllm.evaluation import cells, decode_cell, engines
from entropykv_vllm.evaluation.bench_overhead import hot
from entropykv_vllm.evaluation.bench_overhead.parts import CLOCKS, Parts, watch

WARM_UP_STEPS = 16
PROFILED_STEPS = 128  # at most

#: Prompts differ in length by up to this, so that not all requests reach a boundary at once.
SPREAD = 256


def prompts(requests: int, tokens: int, vocabulary: int) -> list[list[int]]:
    """Prompts of random tokens, evenly spread in length around `tokens`."""
    rng = random.Random(0)
    lengths = [tokens - SPREAD // 2 + i * SPREAD // requests for i in range(requests)]
    return [[rng.randrange(3, vocabulary) for _ in range(length)] for length in lengths]


def blank(runner: Any) -> Callable[..., Any]:
    """In place of the model: hidden states of zeros."""
    import torch

    width = runner.model_config.get_hidden_size()

    def forward(*args: Any, positions: Any, **kwargs: Any) -> Any:
        return torch.zeros(positions.shape[-1], width, dtype=runner.dtype)

    return forward


def decode(engine: Any, parts: Parts, requests: int, steps: int) -> list[dict[str, float]]:
    """The parts of each step.

    Raises:
        RuntimeError: if a request did not get its token in a step, as it waits or has ended.
    """
    found = []
    for _ in range(steps):
        outputs, times = parts.of(engine.step)
        if len(outputs) != requests or any(out.finished for out in outputs):
            raise RuntimeError(f"only {len(outputs)} of {requests} decode: enlarge the pool")
        found.append(times)
    return found


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    """Read the prompts without the model, which changes no step's plan; then time and profile."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import SamplingParams

    llm = engines.make(spec)
    engine, requests = llm.llm_engine, spec["requests"]
    runner = engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    model, runner._model_forward = runner._model_forward, blank(runner)
    vocabulary = runner.model_config.get_vocab_size()
    for i, ids in enumerate(prompts(requests, spec["tokens"], vocabulary)):
        room = runner.max_model_len - len(ids)
        endless = SamplingParams(temperature=0, ignore_eos=True, detokenize=False, max_tokens=room)
        engine.add_request(f"request-{i}", {"prompt_token_ids": ids}, endless)
    reading = decode_cell.read(engine, requests)
    if spec["computed"]:
        runner._model_forward = model
    parts = Parts(CLOCKS[spec["clock"]])
    watch(llm, parts)
    decode(engine, parts, requests, WARM_UP_STEPS)
    steps = decode(engine, parts, requests, spec["steps"])
    profile, profiled = cProfile.Profile(), min(PROFILED_STEPS, spec["steps"])
    profile.runcall(decode, engine, parts, requests, profiled)
    return {
        "reading seconds": reading,
        "steps": {name: [step[name] for step in steps] for name in steps[0]},
        "hottest": hot.hottest(profile, profiled),
    }


if __name__ == "__main__":
    cells.main(measure)
