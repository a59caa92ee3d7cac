# SPDX-License-Identifier: Apache-2.0
"""What a server did between two looks, in numbers and as text."""

from __future__ import annotations

from typing import Any

from entropykv_vllm.plan.tier_table import columns
from entropykv_vllm.top.look import Look

FREED = "vllm:entropykv_pages_freed_total"
EVICTED = "vllm:entropykv_tokens_evicted_total"


def report(now: Look, before: Look | None, url: str) -> dict[str, Any]:
    """Return all that is shown, as JSON has it; what cannot be known yet is None.

    Args:
        now: the newer look.
        before: the older one; None if there is none yet.
        url: of the server.
    """
    if before is not None and _restarted(now, before):
        before = None
    value = now.values.get
    return {
        "url": url,
        "models": sorted(now.models),
        "seconds": None if before is None else now.at - before.at,
        "evicts": evicts(now),
        "running": int(value("vllm:num_requests_running", 0)),
        "waiting": int(value("vllm:num_requests_waiting", 0)),
        "preemptions": int(value("vllm:num_preemptions_total", 0)),
        "tokens_in_per_second": rate(now, before, "vllm:prompt_tokens_total"),
        "tokens_out_per_second": rate(now, before, "vllm:generation_tokens_total"),
        "time_to_first_token_seconds": mean(now, before, "vllm:time_to_first_token_seconds"),
        "inter_token_seconds": mean(now, before, "vllm:inter_token_latency_seconds"),
        "pool_usage": value("vllm:kv_cache_usage_perc", 0) / max(1, len(now.engines)),
        "prefix_hit_rate": _share(
            value("vllm:prefix_cache_hits_total", 0), value("vllm:prefix_cache_queries_total", 0)
        ),
        "pages_freed_per_second": rate(now, before, FREED),
        "tokens_evicted_per_second": rate(now, before, EVICTED),
        "tiers": [_tier(name, now, before) for name in sorted(now.tiers)],
    }


def evicts(now: Look) -> bool | None:
    """Whether the server evicts; before the first request it does not say."""
    if FREED in now.values:
        return True
    return False if now.values.get("vllm:prompt_tokens_total", 0) else None


def rate(now: Look, before: Look | None, name: str) -> float | None:
    """What a counter grew by in a second; one that has come since counts from 0."""
    if before is None or name not in now.values:
        return None
    return (now.values[name] - before.values.get(name, 0.0)) / (now.at - before.at)


def mean(now: Look, before: Look | None, name: str) -> float | None:
    """The mean of what a histogram was told between the looks."""
    if before is None:
        return None
    total, count = (
        now.values.get(f"{name}_{end}", 0.0) - before.values.get(f"{name}_{end}", 0.0)
        for end in ("sum", "count")
    )
    return _share(total, count)


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def _restarted(now: Look, before: Look) -> bool:
    """Whether a counter fell, which only a new server's does."""
    return any(
        now.values.get(name, 0.0) < value
        for name, value in before.values.items()
        if name.endswith("_total")
    )


def _tier(name: str, now: Look, before: Look | None) -> dict[str, Any]:
    found, old = now.tiers[name], {} if before is None else before.tiers.get(name, {})

    def grown(key: str) -> float | None:
        if before is None:
            return None
        return (found.get(key, 0.0) - old.get(key, 0.0)) / (now.at - before.at)

    return {
        "tier": name,
        "hot_pages": int(found.get("hot", 0)),
        "cold_pages": int(found.get("cold", 0)),
        "pages_freed_per_second": grown(FREED),
        "tokens_evicted_per_second": grown(EVICTED),
    }


def text(found: dict[str, Any]) -> str:
    """The tables, and a sentence where nothing is evicted."""
    rows = [
        ["requests running", f"{found['running']:,}"],
        ["requests waiting", f"{found['waiting']:,}"],
        ["preempted since the start", f"{found['preemptions']:,}"],
        ["tokens in/s", _number(found["tokens_in_per_second"])],
        ["tokens out/s", _number(found["tokens_out_per_second"])],
        ["to the first token", _time(found["time_to_first_token_seconds"])],
        ["between tokens", _time(found["inter_token_seconds"])],
        ["pool in use", _percent(found["pool_usage"])],
        ["prefix hits since the start", _percent(found["prefix_hit_rate"])],
    ]
    return "\n\n".join([_head(found), columns(rows, left=1), _eviction(found)])


def _head(found: dict[str, Any]) -> str:
    named = f"{', '.join(found['models'])} on {found['url']}"
    return f"{named}, over {found['seconds']:.1f} s" if found["seconds"] else named


def _eviction(found: dict[str, Any]) -> str:
    if found["evicts"] is None:
        return "No request has come yet; whether the server evicts shows with the first."
    if not found["evicts"]:
        return "The server runs without eviction: serve with --kv-eviction entropykv to have it."
    rows = [["tier", "pages hot", "cold", "freed/s", "tokens evicted/s"]]
    for tier in found["tiers"]:
        rates = tier["pages_freed_per_second"], tier["tokens_evicted_per_second"]
        pages = f"{tier['hot_pages']:,}", f"{tier['cold_pages']:,}"
        rows.append([tier["tier"], *pages, *map(_number, rates)])
    return columns(rows, left=1)


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 100 or value == 0 else f"{value:.3g}"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.1%}"
