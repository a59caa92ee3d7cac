# SPDX-License-Identifier: Apache-2.0
"""The endpoint backend: a running server answers, with whatever cache it has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from entropykv_vllm.evaluation.endpoint import Endpoint
from entropykv_vllm.evaluation.eval import parts, score, texts
from entropykv_vllm.evaluation.eval.grid import Setting
from entropykv_vllm.evaluation.eval.jobs import Job, missing
from entropykv_vllm.evaluation.tasks import TASKS

#: The one setting there is: the server's own.
SERVER = Setting("server", "server", "server")


def answers(tokenizer: Any, jobs: Sequence[Job], progress: Callable[[int, int], None]) -> None:
    """Let the server answer the prompts of one task.

    Raises:
        RunError: if it fails or refuses, in one sentence.
    """
    if not (jobs := missing(jobs)):
        return
    (job,) = jobs
    task, cases = TASKS[job.spec["task"]], texts.cases(tokenizer, job.spec)
    server = Endpoint(job.spec["backend"], tokenizer, job.spec["model"])
    prompts = [case.context + case.question + case.primer for case in cases]

    def rest(done: int) -> Iterator[str]:
        return server.answers(prompts[done:], task.answer_tokens)

    found = parts.results(jobs, len(prompts), rest, progress)
    parts.finish(jobs, [{**score.summary(task, cases, found), "held": None}])
