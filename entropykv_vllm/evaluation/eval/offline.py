# SPDX-License-Identifier: Apache-2.0
"""The offline backend: every setting gets the same keys and values, without a server."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

from entropykv_vllm.evaluation import engines
from entropykv_vllm.evaluation.eval import parts, score, texts
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
    from entropykv_vllm.evaluation.offline.answers import each

    spec = jobs[0].spec
    if not (jobs := missing(jobs)):
        return
    task, cases = TASKS[spec["task"]], texts.cases(tokenizer, spec)
    aware = spec["question"] == "before"

    def rest(done: int) -> Iterator[Any]:
        net = _model(spec["model"])
        return each(net, _cells(jobs), cases[done:], task.answer_tokens, aware)

    rows = parts.results(jobs, len(cases), rest, progress)
    found = []
    for column in zip(*rows, strict=True):
        given, held = zip(*column, strict=True)
        found.append({**score.summary(task, cases, given), "held": sum(held) / len(held)})
    parts.finish(jobs, found)


def divergence(tokenizer: Any, jobs: Sequence[Job], progress: Progress) -> None:
    """Compare next-token distributions with the full cache's, where there is no result."""
    from entropykv_vllm.evaluation.offline.divergence import each, summary

    spec = jobs[0].spec
    if not (jobs := missing(jobs)):
        return
    made = texts.texts(tokenizer, spec)

    def rest(done: int) -> Iterator[Any]:
        return each(_model(spec["model"]), _cells(jobs), made[done:], spec["tokens"])

    rows = parts.results(jobs, len(made), rest, progress)
    parts.finish(jobs, [summary(column) for column in zip(*rows, strict=True)])
