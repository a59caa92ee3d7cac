# SPDX-License-Identifier: Apache-2.0
"""What a run comes to: rates, waits, memory, and right answers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from entropykv_vllm.evaluation import scoring
from entropykv_vllm.evaluation.bench.load import Answer

#: Seconds of decoding alone that tell a rate.
LEAST = 1.0


@dataclass(frozen=True)
class Look:
    """The server at one moment: seconds since the load began, and its own gauges."""

    seconds: float
    running: int
    waiting: int
    used: float  # share of the pool's pages


def summary(
    answers: Sequence[Answer], numbers: Sequence[str], looks: Sequence[Look]
) -> dict[str, Any]:
    """What a run comes to. Requests that failed count as unanswered, and are told of."""
    good = [answer for answer in answers if answer.error is None]
    if not good:
        raise ValueError(f"no request was answered: {answers[0].error}")
    begin, end = min(a.sent for a in answers), max(a.last for a in good)
    waits = [a.first - a.sent for a in good]
    gaps = [(a.last - a.first) / (a.count - 1) for a in good if a.count > 1]
    texts = [a.text if a.error is None else "" for a in answers]
    return {
        "seconds": end - begin,
        "requests a second": len(good) / (end - begin),
        "tokens a second": sum(a.count for a in good) / (end - begin),
        "tokens a second while all decode": decoding_rate(good, looks),
        "decoding share": decoding_share(good, looks),
        "seconds to the first token": _mean(waits),
        "seconds between tokens": _mean(gaps),
        "running at most": max(look.running for look in looks),
        "running on average": sum(look.running for look in looks) / len(looks),
        "pool used at most": max(look.used for look in looks),
        "failed": len(answers) - len(good),
        "errors": sorted({a.error for a in answers if a.error})[:3],
        **scoring.summary(texts, list(numbers)),
    }


def _mean(values: Sequence[float]) -> dict[str, Any]:
    """A mean with its 95 % interval over requests, and percentiles."""
    if not values:
        return {"mean": None, "low": None, "high": None, "p50": None, "p95": None}
    low, high = scoring.bootstrap(list(values))
    ranked = sorted(values)
    return {
        "mean": sum(values) / len(values),
        "low": low,
        "high": high,
        "p50": ranked[len(ranked) // 2],
        "p95": ranked[min(len(ranked) - 1, int(0.95 * len(ranked)))],
    }


def decoding(answers: Sequence[Answer], looks: Sequence[Look]) -> list[tuple[float, float]]:
    """The spans of time in which no prompt is read: all that run have had their first token.

    Both looks at the ends of a span must say so.
    """

    def only(look: Look) -> bool:
        answering = sum(a.first <= look.seconds < a.last for a in answers)
        return look.running > 0 and answering >= look.running

    return [
        (one.seconds, two.seconds)
        for one, two in itertools.pairwise(looks)
        if only(one) and only(two)
    ]


def decoding_share(answers: Sequence[Answer], looks: Sequence[Look]) -> float:
    """The share of a run's time in which no prompt is read."""
    whole = looks[-1].seconds - looks[0].seconds
    return sum(end - start for start, end in decoding(answers, looks)) / whole if whole else 0.0


def decoding_rate(answers: Sequence[Answer], looks: Sequence[Look]) -> float | None:
    """Tokens a second in those spans; None if they are too short to tell."""
    spans = decoding(answers, looks)
    seconds = sum(end - start for start, end in spans)
    times = sorted(pair for a in answers for pair in a.tokens)
    tokens = sum(count for at, count in times if any(start < at <= end for start, end in spans))
    return tokens / seconds if seconds >= LEAST else None
