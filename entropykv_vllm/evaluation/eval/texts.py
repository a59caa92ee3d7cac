# SPDX-License-Identifier: Apache-2.0
"""The text of an evaluation and the prompts made of it, from the specification of a cell."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from entropykv_vllm.errors import UsageError
from entropykv_vllm.evaluation import corpus, passages
from entropykv_vllm.evaluation.tasks import TASKS, Case

# Of texts without sentence ends a piece is so many tokens, so that facts have places to lie at.
LONGEST = 100

# What follows a text's prompt when distributions are compared, and how many texts there are.
STEPS = 48
TEXTS = 8


def describe(path: Path | None) -> dict[str, str] | None:
    """Return the name of a text file and the digest of its content; None is the corpus.

    Raises:
        UsageError: if it cannot be read as text.
    """
    if path is None:
        return None
    return {"path": str(path), "sha256": hashlib.sha256(_read(path).encode()).hexdigest()}


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--text {path} cannot be read: {error}") from None


def sentences(tokenizer: Any, text: dict[str, str] | None) -> list[list[int]]:
    """Return the token ids of the sentences of a text that `describe` returned."""
    prose = None if text is None else _read(Path(text["path"]))
    return [
        ids[at : at + LONGEST]
        for ids in corpus.encode(tokenizer, prose)
        for at in range(0, len(ids), LONGEST)
    ]


def cases(tokenizer: Any, spec: dict[str, Any]) -> list[Case]:
    """Return the prompts of a cell.

    Raises:
        ValueError: if they are too short for the task, in one sentence.
    """
    book = sentences(tokenizer, spec["text"])
    low, high = spec["depths"]
    build = TASKS[spec["task"]].build
    try:
        return build(
            *(tokenizer, book, spec["tokens"], spec["prompts"], spec["seed"], (low, high)),
            spec["question"] == "before",
        )
    except ValueError as error:
        raise ValueError(f"{spec['task']} in {spec['tokens']} tokens: {error}") from None


def texts(tokenizer: Any, spec: dict[str, Any]) -> list[list[int]]:
    """Return the texts of a cell of divergence: prompts, and the tokens that follow them."""
    book = sentences(tokenizer, spec["text"])
    return passages.cut(book, TEXTS, spec["tokens"] + STEPS, passages.opening(tokenizer))
