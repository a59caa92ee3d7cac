# SPDX-License-Identifier: Apache-2.0
"""The answer of `entropykv plan` about a model: from the flags to the report and its text."""

from __future__ import annotations

import argparse
import json
from typing import Any

from entropykv_vllm.config.presets import PRESETS
from entropykv_vllm.config.settings import EvictionConfig, load
from entropykv_vllm.plan import advice, flags
from entropykv_vllm.plan.memory import FULL, Question, check_question, memory_report
from entropykv_vllm.plan.memory_table import memory_text
from entropykv_vllm.plan.model_shape import ModelShape
from entropykv_vllm.plan.pool import Pool, eviction_pool, full_pool
from entropykv_vllm.plan.weights import BYTES, weight_bytes
from entropykv_vllm.serving.settings import page_size

#: The name of the cache with the settings that were given, where they are not a preset's own.
YOURS = "your settings"


def memory_answer(
    args: argparse.Namespace,
    config: EvictionConfig,
    dotted: dict[str, Any],
    name: str,
    shape: ModelShape,
) -> tuple[dict[str, Any], str]:
    """What is printed about a model: as JSON has it, and as text.

    Args:
        config: the settings of the cache that were given, or the default ones.
        dotted: those given one by one.

    Raises:
        ValueError: if something cannot be, in one sentence that says what to do.
    """
    question = question_of(args, shape)
    check_question(shape, question)
    yours = bool(args.config or dotted or args.policy)
    wanted = YOURS if yours else args.preset
    pools, left_out = pools_of(args, shape, config if yours else None, wanted)
    report = memory_report(name, shape, pools, question)
    parts = [memory_text(report)]
    if len(report["cards"]) == 1:
        report["verdict"], serve = advice.verdict(report, wanted)
        parts.append(report["verdict"])
        if serve:
            server_flags = _server_flags(args, serve, config, dotted)
            report["command"] = advice.command(report, server_flags)
            parts.append(f"    {report['command']}")
    report["notes"] = [
        *advice.notes(shape, report, question.stored),
        *advice.policy_notes(config.policy),
        *left_out,
    ]
    return report, "\n\n".join([*parts, *report["notes"]])


def question_of(args: argparse.Namespace, shape: ModelShape) -> Question:
    """What is asked about a model.

    Raises:
        ValueError: if a flag is wrong, in words.
    """
    tokens = flags.tokens(args, shape.positions)
    stored = _stored(args, shape)
    return Question(
        tokens=tokens,
        answer=flags.answer(args, tokens),
        weights=weight_bytes(shape, stored) if stored in BYTES else flags.weights(stored),
        stored=stored if stored in BYTES else "as given",
        cards=flags.cards(args),
        serving=flags.serving(args),
        room=flags.room(args),
    )


def _stored(args: argparse.Namespace, shape: ModelShape) -> str:
    """How the weights are stored: as is said, as the file says, or as the server computes."""
    found: str = args.weights or shape.stored or args.dtype
    if not args.weights and found not in BYTES:
        raise ValueError(
            f"how the weights of this model are quantized ({found}) is not known: say it with "
            "--weights, best as the bytes of its files, such as 5.6GB"
        )
    return found


def pools_of(
    args: argparse.Namespace, shape: ModelShape, yours: EvictionConfig | None, wanted: str | None
) -> tuple[dict[str, Pool], list[str]]:
    """The pool of each cache, and why presets were left out.

    Args:
        yours: settings that are no preset's, if any.
        wanted: the cache that was asked for, if any, which is not left out.

    Raises:
        ValueError: if the settings that were asked for do not fit the model, in words.
    """
    step, item_bytes = flags.serving(args).step_tokens, flags.ITEM_BYTES[args.dtype]
    configs = {name: load(policy, name) for name, policy in PRESETS.items()}
    pools, left_out = {FULL: full_pool(shape, step)}, []
    for name, config in (configs | ({YOURS: yours} if yours else {})).items():
        page = args.page or page_size(config)
        try:
            pools[name] = eviction_pool(shape, config, page, item_bytes, step)
        except ValueError as error:
            if name == wanted or not shape.full_layers:
                raise
            left_out.append(f"{name} is left out: {error}.")
    return pools, left_out


def _server_flags(
    args: argparse.Namespace, cache: str, config: EvictionConfig, dotted: dict[str, Any]
) -> list[str]:
    """The flags of a server with this cache."""
    if cache != YOURS:
        found = ["--kv-eviction", PRESETS[cache], "--kv-eviction-config", cache]
    else:
        found = ["--kv-eviction", config.policy]
        if given := {**flags.given_settings(args), **dotted}:
            found += ["--kv-eviction-config", json.dumps(given)]
    if args.page:
        found += ["--block-size", str(args.page)]
    if args.weights == "fp8":
        found += ["--quantization", "fp8"]
    return found + ([] if args.dtype == "bfloat16" else ["--dtype", args.dtype])
