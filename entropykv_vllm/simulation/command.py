# SPDX-License-Identifier: Apache-2.0
"""`entropykv simulate`: a trace of requests against servers that are not there."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from entropykv_vllm.config.policies import READ_ATTENTION
from entropykv_vllm.config.presets import PRESETS
from entropykv_vllm.config.settings import EvictionConfig
from entropykv_vllm.errors import UsageError
from entropykv_vllm.json_file import show
from entropykv_vllm.plan import flags as plan_flags
from entropykv_vllm.plan.advice import policy_notes
from entropykv_vllm.plan.answer import YOURS, pools_of, question_of
from entropykv_vllm.plan.capacity import check_head
from entropykv_vllm.plan.cards import overhead_bytes, room_bytes
from entropykv_vllm.plan.memory import FULL, LONGEST, Question, check_question
from entropykv_vllm.plan.model_config import find_model
from entropykv_vllm.plan.model_shape import ModelShape, read_shape
from entropykv_vllm.plan.pool import Pool
from entropykv_vllm.plan.sizes import parse_bytes, parse_tokens, show_bytes
from entropykv_vllm.plan.weights import active_parameters
from entropykv_vllm.simulation import flags
from entropykv_vllm.simulation.cost import card_of, estimate
from entropykv_vllm.simulation.fleet import Fleet
from entropykv_vllm.simulation.read import read_trace
from entropykv_vllm.simulation.report import Times, replays, simulate
from entropykv_vllm.simulation.show import text
from entropykv_vllm.simulation.synthetic import make_synthetic, parse_synthetic
from entropykv_vllm.simulation.trace import LATEST, Request

#: The card if none is named, in bytes.
GPU = 24 * 10**9

parser = flags.parser


def main(argv: list[str] | None = None) -> int:
    """Print or write what was simulated; return the exit status."""
    reader = parser()
    args, rest = reader.parse_known_args(argv)
    dotted = plan_flags.dotted(rest, reader)
    try:
        report = _report(args, dotted)
    except ValueError as error:
        raise UsageError(str(error)) from None
    show(text(report), report, args.json)
    return 0


def _report(args: argparse.Namespace, dotted: dict[str, Any]) -> dict[str, Any]:
    flags.check(args)
    plan_flags.check_page(args)
    requests = _requests(args)
    named = args.model is not None
    name, config_json = find_model(args.model) if named else ("MODEL", {})
    shape = read_shape(config_json, plan_flags.numbers(args))
    check_head(shape.head_size)
    question = _question(args, shape)
    room = _room(shape, question)
    fleets, left_out = _fleets(args, dotted, shape, room)
    _check_lengths(requests, fleets)
    times = None if args.steps else _times(args, shape, question)
    total = len(requests) * len(fleets) * replays(times)
    with _bar(total, args.quiet) as progress:
        report = simulate(fleets, requests, args.router, times, progress)
    return {
        "model": name,
        "replicas": args.replicas,
        "room_bytes": room,
        "max_num_seqs": question.serving.requests,
        "max_num_batched_tokens": question.serving.step_tokens,
        **report,
        "notes": [*policy_notes(args.policy or ""), *left_out],
    }


def _requests(args: argparse.Namespace) -> list[Request]:
    if args.trace is not None:
        found = read_trace(args.trace, args.requests)
    else:
        found = make_synthetic(parse_synthetic(args.synthetic))[: args.requests]
    if found[-1].arrival / args.speed > LATEST:
        raise ValueError(f"the last request comes after more than {LATEST:g} seconds")
    if args.speed == 1:
        return found
    return [replace(request, arrival=request.arrival / args.speed) for request in found]


def _question(args: argparse.Namespace, shape: ModelShape) -> Question:
    question = replace(question_of(args, shape), cards=[_card(args)])
    check_question(shape, question)
    return question


def _card(args: argparse.Namespace) -> int:
    return GPU if args.gpu is None else parse_bytes(args.gpu)


def _room(shape: ModelShape, question: Question) -> int:
    if question.room is not None:
        return question.room
    overhead = overhead_bytes(shape, question.serving)
    return room_bytes(question.cards[0], question.weights, overhead, question.serving)


def _times(args: argparse.Namespace, shape: ModelShape, question: Question) -> Times:
    """The card's numbers, but for those that were given."""
    card = card_of(question.cards[0])
    fixed, rate, bandwidth = estimate(card, active_parameters(shape), question.weights)
    given = [args.step_ms, args.prefill_rate, args.bandwidth]
    return Times(
        fixed=fixed if args.step_ms is None else args.step_ms / 1000,
        rate=rate if args.prefill_rate is None else args.prefill_rate,
        bandwidth=bandwidth if args.bandwidth is None else parse_bytes(args.bandwidth),
        card=None if None not in given else card.name,
    )


def _fleets(
    args: argparse.Namespace, dotted: dict[str, Any], shape: ModelShape, room: int
) -> tuple[dict[str, Fleet], list[str]]:
    """The replicas of each cache that was asked for, and why others are left out."""
    yours = _settings(args, dotted)
    wanted = YOURS if yours else args.preset[0] if args.preset else None
    pools, left_out = pools_of(args, shape, yours, wanted)
    chosen = {FULL, YOURS, *(args.preset or (() if yours else PRESETS))}
    fleets = {}
    for name, pool in pools.items():
        if name in chosen:
            observing = name == YOURS and yours is not None and yours.policy in READ_ATTENTION
            caching = args.enable_prefix_caching and not observing
            fleets[name] = _fleet(args, shape, pool, room, caching)
    return fleets, [note for note in left_out if note.split(" is ")[0] in chosen]


def _settings(args: argparse.Namespace, dotted: dict[str, Any]) -> EvictionConfig | None:
    """Settings that are no preset's, if any were given."""
    if not (args.config or args.policy or dotted):
        return None
    given = argparse.Namespace(**{**vars(args), "preset": None})
    return plan_flags.settings(given, dotted)


def _check_lengths(requests: list[Request], fleets: dict[str, Fleet]) -> None:
    shortest = min(request.length for request in requests)
    longest = max(fleet.longest for fleet in fleets.values())
    if shortest > longest:
        raise ValueError(
            f"every request is longer than {longest:,} tokens, the most that fit and that the "
            "model reads: take a larger card, a larger --max-model-len, or shorter requests"
        )


def _fleet(
    args: argparse.Namespace, shape: ModelShape, pool: Pool, room: int, caching: bool
) -> Fleet:
    serving = plan_flags.serving(args)
    limit = shape.positions or LONGEST
    if args.max_model_len is not None:
        limit = min(limit, parse_tokens(args.max_model_len))
    longest = pool.longest(room, limit)
    if not longest:
        raise ValueError(f"no request fits into {show_bytes(room)}: take a larger card")
    return Fleet(
        plan=pool,
        pages=pool.usable(room),
        longest=longest,
        replicas=args.replicas,
        step_tokens=serving.step_tokens,
        requests=serving.requests,
        caching=caching,
        ahead=args.async_scheduling,
    )


@contextlib.contextmanager
def _bar(total: int, quiet: bool) -> Iterator[Callable[[int], None]]:
    """A progress bar, where there is a terminal and tqdm."""
    try:
        from tqdm import tqdm
    except ImportError:
        yield lambda count: None
        return
    with tqdm(total=total, unit="request", disable=True if quiet else None, leave=False) as bar:
        yield bar.update
