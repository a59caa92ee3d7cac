# SPDX-License-Identifier: Apache-2.0
"""Refuses what cannot be calibrated or tuned, before a model is loaded, in one sentence."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from entropykv_vllm.errors import UsageError
from entropykv_vllm.evaluation import engines, identity, options
from entropykv_vllm.evaluation.eval import texts

#: Tokens of a question, its answer, and a little plain text.
AFTER = 64
#: Tokens of a question and its answer.
LEAST_WINDOW = 32
#: The shortest text of which something gets old.
SHORTEST = 1024


def check(args: argparse.Namespace, command: str) -> None:
    """Refuse a model, a length or a text that will not do.

    Without `--out` the results go to a folder of the command and the model.

    Raises:
        UsageError: one sentence that says what is wrong.
    """
    args.model = args.named or args.model
    engines.check_length(args.model, args.tokens, AFTER, "the question")
    args.text = texts.describe(args.text)
    if args.tokens < SHORTEST:
        raise UsageError(f"--tokens must be {SHORTEST} or more: nothing of a shorter text is old")
    args.out = args.out or Path("results") / command / identity.folder(args.model)
    options.check_out(args.out)


def sentences(args: argparse.Namespace, tokenizer: Any) -> list[list[int]]:
    """Return the sentences of the text, in token ids.

    Raises:
        ValueError: if it is too short.
    """
    book = texts.sentences(tokenizer, args.text)
    there = sum(map(len, book))
    if there < args.tokens:
        raise ValueError(f"the text has {there} tokens, and {args.tokens} are needed")
    return book
