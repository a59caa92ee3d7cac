# SPDX-License-Identifier: Apache-2.0
"""The offline backend: every setting gets the same keys and values, without a server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from entropykv_vllm.evaluation import engines
from entropykv_vllm.evaluation.eval import score, texts
from entropykv_vllm.evaluation.eval.jobs import Job, missing
from entropykv_vllm.evaluation.tasks import TASKS

Progress = Callable[[int, int], None]


@lru_cache(maxsize=1)
def _model(name: str) -> Any:
    from entropykv_vllm.evaluation.offline.model import Model

    return Model(engines.model_folder(name))


def _cells(jobs: Sequence[Job]) -> list[Any]:
    from entropykv_vllm.evaluation.offline.cell import Cell

    return [Cell(j.spec["name"], j.spec["policy"], j.spec["eviction"]) for j in jobs]


def answers(tokenizer: Any, jobs: Sequence[Job], progress: Progress) -> None:
    """Answer the prompts of one task in all settings that have no result.

    The context of each prompt is read once.

    Raises:
        ValueError: if settings do not fit the model, in one sentence.
    """
    from entropykv_vllm.evaluation.offline.answers import answer

    spec = jobs[0].spec
    if not (jobs := missing(jobs)):
        return
    task, cases = TASKS[spec["task"]], texts.cases(tokenizer, spec)
    aware = spec["question"] == "before"
    found = answer(_model(spec["model"]), _cells(jobs), cases, task.answer_tokens, aware, progress)
    for job, result in zip(jobs, found, strict=True):
        job.finish({**score.summary(task, cases, result.answers), "held": result.held})


def divergence(tokenizer: Any, jobs: Sequence[Job], progress: Progress) -> None:
    """Compare next-token distributions with the full cache's, where there is no result."""
    from entropykv_vllm.evaluation.offline.divergence import measure

    spec = jobs[0].spec
    if not (jobs := missing(jobs)):
        return
    made = texts.texts(tokenizer, spec)
    found = measure(_model(spec["model"]), _cells(jobs), made, spec["tokens"], progress)
    for job, values in zip(jobs, found, strict=True):
        job.finish(values)
