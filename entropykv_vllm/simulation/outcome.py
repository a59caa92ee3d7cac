# SPDX-License-Identifier: Apache-2.0
"""What a replay says about a cache, in numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from entropykv_vllm.simulation.replay import Replay


def outcome(replay: Replay, pages: int) -> dict[str, Any]:
    """Numbers of a replay, over all replicas; seconds are steps where steps were counted.

    Args:
        pages: of each replica.
    """
    notes = [lane.notes for lane in replay.lanes]
    busy = sum(one.busy for one in notes)
    held = _ratio(sum(one.held_time for one in notes), busy)
    peak = max(one.held_most for one in notes)
    prompts = sum(job.prompt for job in replay.jobs)
    answered = sum(one.answered for one in notes)
    return {
        "seconds": replay.seconds,
        "busy_seconds": busy,
        "steps": sum(one.steps for one in notes),
        "prompt_tokens": prompts,
        "answer_tokens": answered,
        "computed_tokens": sum(one.tokens for one in notes),
        "answer_rate": _ratio(answered, replay.seconds),
        "preemptions": sum(one.preemptions for one in notes),
        "preempted_requests": sum(job.preemptions > 0 for job in replay.jobs),
        "prefix_hit_tokens": sum(job.found for job in replay.jobs),
        "prefix_hit_rate": _ratio(sum(job.found for job in replay.jobs), prompts),
        "held_pages": held,
        "held_share": held / pages,
        "peak_pages": peak,
        "peak_share": peak / pages,
        "running": _ratio(sum(one.running_time for one in notes), busy),
        "running_most": max(one.running_most for one in notes),
        "queue": _ratio(sum(one.waiting_time for one in notes), busy),
        "queue_most": max(one.waiting_most for one in notes),
        "wait": _spread([(job.started or 0) - job.arrival for job in replay.jobs]),
        "first_token": _spread([(job.answered or 0) - job.arrival for job in replay.jobs]),
        "whole": _spread([(job.finished or 0) - job.arrival for job in replay.jobs]),
    }


def limit(replay: Replay) -> tuple[float, bool]:
    """Tokens of answers a second while requests wait, and whether any ever did.

    Where none did on a replica, the trace is too short to fill it, and its whole time counts.
    """
    rate, filled = 0.0, True
    for lane in replay.lanes:
        notes = lane.notes
        full = notes.full_until > 0 and notes.full_answered > 0
        filled = filled and full
        rate += (
            notes.full_answered / notes.full_until
            if full
            else _ratio(notes.answered, replay.seconds)
        )
    return rate, filled


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _spread(values: Sequence[float]) -> dict[str, float]:
    """Mean, median, 95th percentile and largest of some seconds."""
    found = sorted(values) or [0.0]
    return {
        "mean": sum(found) / len(found),
        "median": found[len(found) // 2],
        "p95": found[min(len(found) - 1, int(0.95 * len(found)))],
        "most": found[-1],
    }
