# SPDX-License-Identifier: Apache-2.0
"""`entropykv plan`: what fits in a card and what a request holds, before any server is started."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from typing import Any

from entropykv_vllm.config.settings import EvictionConfig
from entropykv_vllm.errors import UsageError
from entropykv_vllm.json_file import show
from entropykv_vllm.plan import flags
from entropykv_vllm.plan.answer import memory_answer
from entropykv_vllm.plan.capacity import capacity, check_head
from entropykv_vllm.plan.model_config import find_model
from entropykv_vllm.plan.model_shape import layer_count, read_shape
from entropykv_vllm.plan.tier_table import tier_report, tier_text
from entropykv_vllm.plan.tiers import make_tiers
from entropykv_vllm.serving.settings import page_size

parser = flags.parser


def main(argv: list[str] | None = None) -> int:
    """Print what fits, or the tiers of a plan; return the exit status."""
    reader = parser()
    args, rest = reader.parse_known_args(argv)
    dotted = flags.dotted(rest, reader)
    try:
        report, text = _answer(args, dotted)
    except ValueError as error:
        raise UsageError(str(error)) from None
    show(text, report, args.json)
    return 0


def _answer(args: argparse.Namespace, dotted: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """What is printed: as JSON has it, and as text."""
    flags.check_page(args)
    config = flags.settings(args, dotted)
    if not flags.asks_about_memory(args):
        layers = range(layer_count(30 if args.layers is None else args.layers))
        head_size = 64 if args.head_size is None else args.head_size
        return _tiers(args, config, layers, head_size, flags.tokens(args))
    named = args.model is not None
    name, config_json = find_model(args.model) if named else ("MODEL", {})
    shape = read_shape(config_json, flags.numbers(args))
    if args.tiers:
        tokens = flags.tokens(args, shape.positions)
        return _tiers(args, config, shape.full_layers, shape.head_size, tokens)
    check_head(shape.head_size)
    return memory_answer(args, config, dotted, name, shape)


def _tiers(
    args: argparse.Namespace,
    config: EvictionConfig,
    layers: Sequence[int],
    head_size: int,
    tokens: int,
) -> tuple[dict[str, Any], str]:
    check_head(head_size)
    item_bytes = flags.ITEM_BYTES[args.dtype]
    page = args.page or page_size(config)
    tiers = make_tiers(config, layers, page, partial(capacity, head_size, page, item_bytes))
    report = tier_report(config.policy, tiers, tokens, item_bytes)
    return report, tier_text(report)
