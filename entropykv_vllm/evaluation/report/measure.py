# SPDX-License-Identifier: Apache-2.0
"""Runs a section offline, prompt by prompt; a run that was interrupted goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from entropykv_vllm.evaluation import corpus, engines, passages
from entropykv_vllm.evaluation.offline import answers, divergence, runs
from entropykv_vllm.evaluation.offline.model import Model
from entropykv_vllm.evaluation.report.prompts import cases
from entropykv_vllm.evaluation.report.sections import Section
from entropykv_vllm.evaluation.tasks import TASKS

#: Tokens that texts are followed for.
STEPS = 48

Progress = Callable[[int, int], None]


@lru_cache(maxsize=1)
def model(name: str) -> Model:
    """Load a model, or return the one loaded last."""
    return Model(engines.model_folder(name))


def run(section: Section, folder: Path, progress: Progress) -> list[Any]:
    """Return the results of a section: for each prompt, what each cell made of it."""
    produce = _texts if section.task == "text" else _answers
    path = folder / f"{section.name}.jsonl"

    def rest(done: int) -> Iterator[Any]:
        return produce(section, done)

    return runs.resumed(path, section.spec(), section.prompts, rest, progress)


def _answers(section: Section, done: int) -> Iterator[dict[str, Any]]:
    """Each cell's answer and its grade."""
    net, task = model(section.model), TASKS.get(section.task, TASKS["needle"])
    asked = cases(net.tokenizer, section)[done:]
    found = answers.each(
        net, section.cells, asked, task.answer_tokens, section.aware, section.dtype
    )
    for case, row in zip(asked, found, strict=True):
        yield {
            "wanted": case.answers,
            "depth": round(case.depth, 4),
            "answers": [text for text, _ in row],
            "grades": [task.grade(text, case) for text, _ in row],
            "held": [round(held, 5) for _, held in row],
        }


def _texts(section: Section, done: int) -> Iterator[list[dict[str, Any]]]:
    """Each cell's divergence from the full cache, a mean over the steps of a text."""
    net = model(section.model)
    book = corpus.encode(net.tokenizer)
    length = section.tokens + STEPS
    first = passages.opening(net.tokenizer)
    for ids in passages.cut(book, section.prompts, length, first)[done:]:
        found = divergence.measure(net, section.cells, [ids], section.tokens, dtype=section.dtype)
        yield [{name: one[name][:1] for name in ("kl", "top1")} for one in found]
