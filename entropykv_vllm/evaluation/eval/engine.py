# SPDX-License-Identifier: Apache-2.0
"""The engine backend: vLLM answers, in a process of its own for each setting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from entropykv_vllm.errors import RunError
from entropykv_vllm.evaluation import cells, engines, pool
from entropykv_vllm.evaluation.eval import texts
from entropykv_vllm.evaluation.eval.jobs import DIVERGENCE, Job, digest
from entropykv_vllm.evaluation.progress import complain
from entropykv_vllm.evaluation.tasks import TASKS

MODULE = "entropykv_vllm.evaluation.eval.cell"
RECORDER = "entropykv_vllm.evaluation.recorder:Recorder"

# Requests that share a step; results do not depend on it.
TOGETHER = 4

# Tokens that a question may have, and a primer.
QUESTION, PRIMER = 48, 32

Progress = Callable[[int, int], None]


def complete(spec: dict[str, Any], out: Path) -> dict[str, Any]:
    """Add to a cell's specification what its engine needs to know."""
    if spec["task"] == DIVERGENCE:
        engine = arguments(spec, spec["tokens"] + texts.STEPS)
        engine["logits_processors"] = [RECORDER]
        yardstick = str(_yardstick(spec, out))
        return {**spec, "engine": engine, "steps": texts.STEPS, "yardstick": yardstick}
    aware = spec["question"] == "before"
    longest = spec["tokens"] + more(spec["task"], aware)
    eviction = dict(spec["eviction"])
    if aware and spec["policy"] != "none":
        eviction["interval"] = spec["tokens"]  # collapsed once, right after the question
    return {**spec, "eviction": eviction, "engine": arguments(spec, longest)}


def more(task: str, aware: bool) -> int:
    """Return how many tokens may follow those that `--tokens` counts, the answer's included."""
    return QUESTION * (not aware) + PRIMER + TASKS[task].answer_tokens


def arguments(spec: dict[str, Any], longest: int) -> dict[str, Any]:
    """Return vLLM's arguments besides the policy's, for requests of at most `longest` tokens.

    The full cache is stock vLLM's and has numbers of 32 bits as the model has, the new pages of the
    others have 16. The pool has room for all requests together.
    """
    stock = spec["policy"] == "none"
    shape = pool.shape(engines.model_folder(spec["model"]), "float32" if stock else "bfloat16")
    return {
        "max_model_len": longest,
        "max_num_seqs": TOGETHER,
        "enforce_eager": True,
        "kv_cache_dtype": "auto" if stock else "bfloat16",
        "kv_cache_memory_bytes": pool.pool_bytes(shape, (TOGETHER + 1) * longest),
    }


def _yardstick(spec: dict[str, Any], out: Path) -> Path:
    """Return the file of the full cache's distributions."""
    name = digest({key: spec.get(key) for key in ("model", "weights", "text", "tokens")})
    return out / "cells" / f"{DIVERGENCE}-{spec['tokens']}-{name}.npy"


def answers(_: Any, jobs: Sequence[Job], progress: Progress) -> None:
    """Run the cells that have no result; a failed one is reported and left out."""
    _run(jobs, jobs[0].spec["prompts"], progress)


def divergence(_: Any, jobs: Sequence[Job], progress: Progress) -> None:
    """Run the cells that have no result, the full cache, which others are compared with, first."""
    full = jobs[0]
    if not Path(full.spec["yardstick"]).is_file():
        full.path.unlink(missing_ok=True)
    _run(jobs, texts.TEXTS, progress)


def _run(jobs: Sequence[Job], each: int, progress: Progress) -> None:
    for i, job in enumerate(jobs):

        def step(done: int, _: int, before: int = i * each) -> None:
            progress(before + done, len(jobs) * each)

        try:
            cells.run(MODULE, job.spec, job.path, step)
        except RunError as error:
            complain(str(error))
        step(each, each)
