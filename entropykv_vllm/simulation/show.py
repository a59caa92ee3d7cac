# SPDX-License-Identifier: Apache-2.0
"""What was simulated, in words and tables."""

from __future__ import annotations

from typing import Any

from entropykv_vllm.plan.sizes import show_bytes
from entropykv_vllm.plan.tier_table import columns


def text(report: dict[str, Any]) -> str:
    """The report of `report.simulate`, with what `command` adds, as text."""
    parts = [_head(report)]
    if report["times"]:
        parts += [_times(report["times"]), _paced(report)]
    return "\n\n".join([*parts, _full(report), *_notes(report)])


def _head(report: dict[str, Any]) -> str:
    count, replicas = report["requests"], report["replicas"]
    several = f"{replicas} replicas ({report['router']}), each" if replicas > 1 else "one replica"
    span = f"in {_seconds(report['seconds'])}" if report["times"] else "all at once"
    return (
        f"{count:,} requests of {report['prompt_tokens'] / count:,.0f} tokens and answers of "
        f"{report['answer_tokens'] / count:,.0f} on average, {span};\n"
        f"{report['model']} on {several} with {show_bytes(report['room_bytes'])} for pages,\n"
        f"--max-num-seqs {report['max_num_seqs']} and "
        f"--max-num-batched-tokens {report['max_num_batched_tokens']}."
    )


def _times(times: dict[str, Any]) -> str:
    card = f", as of an {times['card']}" if times["card"] else ""
    return (
        f"Times are a model's, not measured{card}: {times['rate']:,.0f} tokens of prompts a "
        f"second, at least {1000 * times['fixed']:.3g} ms a\nstep, and "
        f"{show_bytes(times['bandwidth'])} of pages read in a second."
    )


def _paced(report: dict[str, Any]) -> str:
    heads = "preempted", "prefix hits", "pages held", "at the peak", "waited", "95 %"
    rows = [["cache", *heads, "queue", "longest"]]
    for cache in report["caches"]:
        if found := cache.get("paced"):
            rows.append(
                [
                    cache["cache"],
                    f"{found['preemptions']:,}",
                    f"{found['prefix_hit_rate']:.1%}",
                    *_pages(found),
                    _seconds(found["wait"]["mean"]),
                    _seconds(found["wait"]["p95"]),
                    f"{found['queue']:.1f}",
                    f"{found['queue_most']:,}",
                ]
            )
    return f"As they come:\n\n{columns(rows, left=1)}"


def _full(report: dict[str, Any]) -> str:
    unit = "s" if report["times"] else "step"
    heads = "pages", "at a time", "preempted", "prefix hits", "pages held", "at the peak"
    rows = [["cache", *heads, f"tokens/{unit}", "times full"]]
    rates = [cache.get("limit") for cache in report["caches"]]
    for cache, rate in zip(report["caches"], rates, strict=True):
        if rate is not None:
            found = cache["full"]
            rows.append(
                [
                    cache["cache"],
                    f"{cache['pages']:,}",
                    f"{found['running']:.1f}",
                    f"{found['preemptions']:,}",
                    f"{found['prefix_hit_rate']:.1%}",
                    *_pages(found),
                    f"{rate:,.0f}" if report["times"] else f"{rate:.3g}",
                    f"{rate / rates[0]:.2f}" if rates[0] else "–",
                ]
            )
    return (
        "The limit: always more requests than fit, and the tokens of answers that all replicas "
        f"give:\n\n{columns(rows, left=1)}"
    )


def _pages(found: dict[str, Any]) -> list[str]:
    return [
        f"{found['held_pages']:,.0f} ({found['held_share']:.0%})",
        f"{found['peak_pages']:,} ({found['peak_share']:.0%})",
    ]


def _notes(report: dict[str, Any]) -> list[str]:
    notes = [
        f"{cache['cache']} refuses {cache['refused']:,} of them, which are longer than "
        f"{cache['longest']:,} tokens; its other figures are without them."
        for cache in report["caches"]
        if cache["refused"]
    ]
    short = [cache["cache"] for cache in report["caches"] if cache.get("filled") is False]
    if short:
        notes.append(
            f"The trace is too short for a limit of {', '.join(short)}: all of it ran, and the "
            "whole time counts. Give more --synthetic requests or a longer trace."
        )
    return notes + report["notes"]


def _seconds(value: float) -> str:
    if value >= 100:
        return f"{value:,.0f} s"
    return f"{value:.3g} s" if value >= 1 else f"{1000 * value:.3g} ms"
