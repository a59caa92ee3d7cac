# SPDX-License-Identifier: Apache-2.0
"""Refuses what cannot be evaluated, before anything is started, in one sentence."""

from __future__ import annotations

import argparse
from typing import Any

from entropykv_vllm.evaluation import engines, options
from entropykv_vllm.evaluation.eval import run, texts, windows
from entropykv_vllm.evaluation.eval.engine import more
from entropykv_vllm.evaluation.tasks import TASKS
from entropykv_vllm.model.fetch import NAME

# A whole page of any bits: collapsing right after the question needs one to end there.
PAGE = 64


def check(args: argparse.Namespace) -> None:
    """Complete the arguments, and refuse what cannot be measured.

    Raises:
        ValueError: one sentence that says what is wrong.
    """
    args.tasks = list(TASKS) if args.tasks == ["all"] else args.tasks
    for task in args.tasks:
        if task not in TASKS:
            raise ValueError(f"'{task}' is not a task: choose of {', '.join(TASKS)}")
    if (not args.tasks and not args.kl) or not args.tokens or args.prompts < 1:
        raise ValueError("nothing is asked for: name tasks, tokens and prompts")
    args.text = texts.describe(args.text)
    options.check_out(args.out)
    if args.backend.startswith(("http://", "https://")):
        _check_endpoint(args)
    elif args.backend in ("offline", "engine"):
        _check_model(args)
    else:
        raise ValueError(f"'{args.backend}' is no backend: offline, engine, or http://HOST:PORT/v1")


def _check_endpoint(args: argparse.Namespace) -> None:
    """An endpoint reads prompts with its own policy, and says nothing about distributions."""
    for name in ("policies", "keeps", "bits", "presets", "config"):
        if getattr(args, name):
            raise ValueError(
                f"--{name} is for the offline and the engine backend: an endpoint is one row, "
                "the server as it is"
            )
    if args.kl:
        raise ValueError("--kl needs the offline or the engine backend")
    if args.question == "before":
        raise ValueError("--question before needs the offline or the engine backend")
    args.tokenizer = args.tokenizer or NAME


def _check_model(args: argparse.Namespace) -> None:
    args.model = args.model or NAME
    args.tokenizer = args.model
    if args.policies is None:
        args.policies = [] if args.presets else ["entropykv", "sink"]
    args.keeps = args.keeps or [1.0, 0.5, 0.25]
    args.bits = args.bits or [16, 8, 4]
    for tokens in args.tokens:
        for task in args.tasks:
            follows = more(task, aware=args.question == "before")
            engines.check_length(args.model, tokens, follows, f"question and answers of {task}")
            _check_windows(args, tokens, more(task, aware=False))
        if args.kl:
            engines.check_length(args.model, tokens, texts.STEPS, "what follows")
        if args.question == "before" and tokens % PAGE:
            raise ValueError(f"--tokens {tokens}: with --question before, a multiple of {PAGE}")


def _check_windows(args: argparse.Namespace, tokens: int, asked: int) -> None:
    """Else the question itself would be evicted from, in some layers at least."""
    for setting in run.settings(args, tokens)[1:]:
        if (window := windows.least(setting.config(), args.model)) < asked:
            raise ValueError(
                f"{setting.name} has a layer with a window of {window} tokens, and the "
                f"question and its answer take up to {asked}: set a longer one"
            )


def check_text(args: argparse.Namespace, tokenizer: Any) -> None:
    """Refuse a text that would have to repeat itself within one prompt.

    Raises:
        ValueError: if it is too short.
    """
    needed = max(args.tokens) + (texts.STEPS if args.kl else 0)
    there = sum(map(len, texts.sentences(tokenizer, args.text)))
    if there < needed:
        raise ValueError(f"the text has {there} tokens, and {needed} are needed")
