# SPDX-License-Identifier: Apache-2.0
"""What jobs that run together have found so far: an interrupted run goes on prompt by prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from entropykv_vllm.evaluation.eval.jobs import Job, digest
from entropykv_vllm.evaluation.offline import runs


def results(
    jobs: Sequence[Job],
    count: int,
    produce: Callable[[int], Iterator[Any]],
    progress: Callable[[int, int], None],
) -> list[Any]:
    """Return `count` results of the jobs together, as `runs.resumed` does."""
    return runs.resumed(_file(jobs), {"jobs": _specs(jobs)}, count, produce, progress)


def finish(jobs: Sequence[Job], found: Sequence[dict[str, Any]]) -> None:
    """Keep the result of each job; what led to it is no longer needed."""
    for job, values in zip(jobs, found, strict=True):
        job.finish(values)
    _file(jobs).unlink()


def _file(jobs: Sequence[Job]) -> Path:
    spec = jobs[0].spec
    name = f"{spec['task']}-{spec['tokens']}-part-{digest({'jobs': _specs(jobs)})}.jsonl"
    return jobs[0].path.parent / name


def _specs(jobs: Sequence[Job]) -> list[dict[str, Any]]:
    return [job.spec for job in jobs]
