# SPDX-License-Identifier: Apache-2.0
"""What a model takes and what fits, in words and tables."""

from __future__ import annotations

from typing import Any

from entropykv_vllm.plan.memory import LONGEST
from entropykv_vllm.plan.sizes import show_bytes, show_count
from entropykv_vllm.plan.tier_table import columns


def memory_text(report: dict[str, Any]) -> str:
    """The report of `memory.memory_report` as text."""
    parts = [_model(report), _request(report)]
    cards = report["cards"]
    parts += [_one_card(report, cards[0])] if len(cards) == 1 else [_cards(report, cards)]
    return "\n\n".join(parts)


def _model(report: dict[str, Any]) -> str:
    full, layers = report["full_attention_layers"], report["layers"]
    heads = f"{report['kv_heads']} KV head{'s' * (report['kv_heads'] > 1)}"
    sliding = f", {layers - full} of them with a sliding window" if full < layers else ""
    return (
        f"{report['model']}: {show_count(report['parameters'])} parameters, "
        f"{show_bytes(report['weight_bytes'])} ({report['weights']}); {layers} layers of {heads} "
        f"of {report['head_size']}{sliding}."
    )


def _request(report: dict[str, Any]) -> str:
    rows = [["cache", "pages", "each", "while answering", "at the peak", "times smaller"]]
    rows += [
        [
            cache["cache"],
            f"{cache['peak_pages']:,}",
            show_bytes(cache["page_bytes"]),
            show_bytes(cache["held_bytes"]),
            show_bytes(cache["peak_bytes"]),
            f"{cache['times_smaller']:.2f}",
        ]
        for cache in report["caches"]
    ]
    return (
        f"One request of {report['tokens']:,} tokens, the last {report['answer']:,} of them its "
        f"answer:\n\n{columns(rows, left=1)}"
    )


def _one_card(report: dict[str, Any], card: dict[str, Any]) -> str:
    tokens = f"{report['tokens']:,}"
    rows = [["cache", "pages", "longest request", f"requests of {tokens} at once"]]
    rows += [
        [
            fit["cache"],
            f"{fit['pages']:,}",
            _longest(report, fit["longest"]),
            f"{fit['requests']:,}" if fit["requests"] else "none",
        ]
        for fit in card["fits"]
    ]
    return f"{_room(report, card)}\n\n{columns(rows, left=1)}"


def _room(report: dict[str, Any], card: dict[str, Any]) -> str:
    room = show_bytes(card["room_bytes"])
    if card["card_bytes"] is None:
        return f"In {room} of pages:"
    share = report["gpu_memory_utilization"]
    return (
        f"A card of {show_bytes(card['card_bytes'])} at --gpu-memory-utilization {share:g} has "
        f"{show_bytes(card['card_bytes'] * share)} for vLLM: {show_bytes(report['weight_bytes'])} "
        f"for the weights,\nabout {show_bytes(report['overhead_bytes'])} for activations and CUDA "
        f"(--overhead), and {room} for pages:"
    )


def _longest(report: dict[str, Any], tokens: int) -> str:
    if not tokens:
        return "none"
    if report["positions"] is None and tokens == LONGEST:
        return f"{tokens:,} or more"
    return f"{tokens:,}{' (all)' if tokens == report['positions'] else ''}"


def _cards(report: dict[str, Any], cards: list[dict[str, Any]]) -> str:
    head = ["cache", *(show_bytes(card["card_bytes"]) for card in cards)]
    longest, requests = [head], [head]
    for i, cache in enumerate(report["caches"]):
        fits = [card["fits"][i] for card in cards]
        longest.append([cache["cache"], *(_amount(fit["longest"]) for fit in fits)])
        requests.append([cache["cache"], *(_amount(fit["requests"]) for fit in fits)])
    rooms = ["for pages", *(_room_left(card["room_bytes"]) for card in cards)]
    longest.insert(1, rooms)
    most = report["positions"]
    reads = f" (the model reads {most:,})" if most else ""
    return (
        f"The longest request by the size of the card, of which vLLM has "
        f"{report['gpu_memory_utilization']:.0%}; the weights and about\n"
        f"{show_bytes(report['overhead_bytes'])} for activations and CUDA (--overhead) are taken "
        f"off{reads}:\n\n{columns(longest, left=1)}\n\n"
        f"Requests of {report['tokens']:,} tokens at once:\n\n{columns(requests, left=1)}"
    )


def _room_left(room: int) -> str:
    return show_bytes(room) if room > 0 else "–"


def _amount(value: int) -> str:
    return f"{value:,}" if value else "–"
