# SPDX-License-Identifier: Apache-2.0
"""The prompts of a section: those of a task, or of a measurement through the engine."""

from __future__ import annotations

from typing import Any

from entropykv_vllm.evaluation import corpus, generation_cell, prompts
from entropykv_vllm.evaluation.report.sections import Section
from entropykv_vllm.evaluation.tasks import TASKS, Case


def cases(tokenizer: Any, section: Section) -> list[Case]:
    """Return the prompts of a section, in order."""
    if section.task in generation_cell.ASKED:
        return _generated(tokenizer, section)
    book = corpus.encode(tokenizer)
    arguments = section.tokens, section.prompts, section.seed, (0.0, 1.0)
    if section.through_engine:
        return _of_needle_command(tokenizer, prompts.build(tokenizer, book, *arguments))
    return TASKS[section.task].build(tokenizer, book, *arguments, section.aware)


def _of_needle_command(tokenizer: Any, made: list[prompts.Case]) -> list[Case]:
    """The very prompts of `entropykv needle`."""
    asked = len(tokenizer.encode(prompts.QUESTION, add_special_tokens=False))
    return [
        Case(one.ids[:-asked], one.ids[-asked:-1], one.ids[-1:], (one.number,), one.depth)
        for one in made
    ]


def _generated(tokenizer: Any, section: Section) -> list[Case]:
    """The texts of `entropykv generation`, asked one way: what was decoded there is read here."""
    spec = {"prompt": GENERATED_PROMPT, "texts": section.prompts}
    spec["generated"] = section.tokens - spec["prompt"]
    found = []
    for one in generation_cell.cases(spec, tokenizer):
        if one["asked"] == section.task:
            question = generation_cell.ASKED[section.task]
            asked = len(tokenizer.encode(question, add_special_tokens=False))
            ids = one["ids"] + one["forced"]
            parts = ids[:-asked], ids[-asked:-1], ids[-1:]
            found.append(Case(*parts, (one[section.task],), 0.0))
    return found


#: Tokens before those that count as generated.
GENERATED_PROMPT = 160
