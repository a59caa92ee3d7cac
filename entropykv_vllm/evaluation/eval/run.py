# SPDX-License-Identifier: Apache-2.0
"""Runs the cells of an evaluation, one task and length after the other."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from entropykv_vllm.evaluation.eval import endpoint, engine, grid, jobs, offline, texts
from entropykv_vllm.evaluation.eval.jobs import DIVERGENCE, Job
from entropykv_vllm.evaluation.progress import bar


@dataclass(frozen=True)
class Group:
    """The settings of one task and length, which a backend runs together."""

    task: str
    tokens: int
    jobs: list[Job]
    size: int  # answers, or texts

    @property
    def name(self) -> str:
        """What the progress bar shows."""
        return f"{self.task} {self.tokens}"


def groups(args: argparse.Namespace) -> list[Group]:
    """Return all groups of a table, plain text last.

    Raises:
        ValueError: if a setting is wrong, in one sentence.
    """
    tasks = [*args.tasks, *([DIVERGENCE] if args.kl else [])]
    return [_group(args, task, tokens) for task in tasks for tokens in args.tokens]


def _group(args: argparse.Namespace, task: str, tokens: int) -> Group:
    each = texts.TEXTS if task == DIVERGENCE else args.prompts
    specs = [jobs.spec(args, task, tokens, setting) for setting in settings(args, tokens)]
    if args.backend == "engine":
        specs = [engine.complete(spec, args.out) for spec in specs]
    return Group(task, tokens, [jobs.job(args.out, spec) for spec in specs], each * len(specs))


def settings(args: argparse.Namespace, tokens: int) -> list[grid.Setting]:
    """Return the settings that are compared in prompts of a length."""
    if args.backend.startswith("http"):
        return [endpoint.SERVER]
    return grid.settings(args.policies, args.keeps, args.bits, args.presets, args.config, tokens)


def _backend(name: str) -> Any:
    return {"offline": offline, "engine": engine}.get(name, endpoint)


def run(args: argparse.Namespace, tokenizer: Any, wanted: Sequence[Group]) -> list[dict[str, Any]]:
    """Run what has no result yet, and return all results in the order of the table.

    Raises:
        ValueError: if the model and the settings do not go together, in words.
        RunError: if a server does not answer.
    """
    backend = _backend(args.backend)
    with bar(sum(group.size for group in wanted), "answer") as shown:
        for group in wanted:
            shown.set_description(group.name)
            call = backend.divergence if group.task == DIVERGENCE else backend.answers
            start = shown.n
            call(tokenizer, group.jobs, _progress(shown, start, group.size))
            shown.update(start + group.size - shown.n)
    found = [job.result() for group in wanted for job in group.jobs]
    return [result for result in found if result is not None]


def _progress(shown: Any, start: int, size: int) -> Callable[[int, int], None]:
    def step(done: int, total: int) -> None:
        shown.update(start + size * done // total - shown.n)

    return step
