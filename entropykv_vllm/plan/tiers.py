# SPDX-License-Identifier: Apache-2.0
"""Which layers share a tier, and the geometry of each tier."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from importlib import import_module

from entropykv_vllm.config.settings import EvictionConfig, TierConfig
from entropykv_vllm.plan import lara
from entropykv_vllm.plan.schedule import TierPlan

#: The share of the layers that LARA's early tier takes, and its late tier.
EDGE = Fraction(1, 5)

#: The length of a segment, in tokens, that the automatic one is near to.
SEGMENT = 256


@dataclass(frozen=True)
class Tier:
    """A set of layers (by their index in the whole model) with one plan."""

    layers: tuple[int, ...]
    plan: TierPlan


def make_tiers(
    config: EvictionConfig, layers: Sequence[int], page: int, capacity: Callable[[int], int]
) -> tuple[Tier, ...]:
    """Cut the full-attention layers of a model into tiers.

    Args:
        config: the validated settings.
        layers: the indices of the layers with full attention, in the whole model.
        page: tokens per hot page.
        capacity: tokens per cold page for a number of bits; `plan.capacity.capacity`, for a model.

    Raises:
        ValueError: if the settings do not fit the model or the page size, in words.
    """
    if not layers:
        raise ValueError(
            "the model has no full-attention layer, so there is nothing to evict: choose another"
        )
    colds = {bits: capacity(bits) for bits in config.bits_used}
    _check_pages(config, page, colds)
    _check_segment(config, page, colds)
    if config.tiers is not None:
        return _tiers_by_hand(config, config.tiers, layers, page, colds)
    return _curved_tiers(config, layers, page, colds[config.bits])


def _check_pages(config: EvictionConfig, page: int, colds: dict[int, int]) -> None:
    for bits, cold in colds.items():
        if bits < 16 and cold <= page:
            raise ValueError(
                f"a page of {page} tokens would hold {cold} of {bits} bits, which saves nothing: "
                f"set a larger --block-size, such as {2 * page}"
            )
        if config.cap is not None and config.cap < cold:
            raise ValueError(
                f"cap must have room for one old page of {cold} tokens, and {config.cap} has not: "
                f"set kv-eviction-config.cap to {cold} or more"
            )
    if config.sinks > page:
        raise ValueError(f"sinks must fit one page of {page} tokens, and {config.sinks} do not")


def _check_segment(config: EvictionConfig, page: int, colds: dict[int, int]) -> None:
    unit = math.lcm(page, *colds.values())
    if config.segment is not None and config.segment % unit:
        raise ValueError(
            f"segment must be whole pages, of {page} tokens when new and of "
            f"{' or '.join(map(str, sorted(colds.values())))} when old, and {config.segment} is "
            f"not: set kv-eviction-config.segment to {_next(config.segment, unit)}, or leave it out"
        )


def _next(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def automatic_segment(page: int, cold: int) -> int:
    """Whole hot pages and whole cold pages, near to `SEGMENT` tokens."""
    unit = math.lcm(page, cold)
    return max(1, round(SEGMENT / unit)) * unit


def group_size(layers: int) -> int:
    """Layers per page group when early and late tiers take about `EDGE` of the layers each.

    It divides the number of layers, so vLLM gets groups of equal size without padding.
    """
    divisors = [d for d in range(1, layers + 1) if layers % d == 0 and layers // d >= 3]
    return min(divisors, key=lambda d: (abs(d - EDGE * layers), d), default=layers)


def _curved_tiers(
    config: EvictionConfig, layers: Sequence[int], page: int, cold: int
) -> tuple[Tier, ...]:
    count = len(layers)
    edge = group_size(count)
    uniform = config.lara_window == 0 and config.lara_keep == 0
    if uniform or count < 3 * edge:
        plan = _plan(config, "all", (page, cold, config.bits), config.window, config.keep)
        return (Tier(tuple(layers), plan),)
    curve = import_module(f"entropykv_vllm.plan.{config.curve}")
    cuts, shape = curve.cuts(count, edge), curve.curve(count)
    means = [sum(shape[a:b]) / (b - a) for a, b in cuts.values() for _ in range(a, b)]
    limit = _window_limits(config, page)
    windows = lara.allocate(config.window, config.lara_window, means, *limit)
    keeps = lara.allocate(config.keep, config.lara_keep, means, 0.0, 1.0)
    return tuple(
        Tier(
            tuple(layers[a:b]),
            _plan(config, name, (page, cold, config.bits), round(windows[a]), keeps[a]),
        )
        for name, (a, b) in cuts.items()
    )


def _window_limits(config: EvictionConfig, page: int) -> tuple[float, float]:
    return min(page, config.window), float("inf")


def _tiers_by_hand(
    config: EvictionConfig,
    tiers: Sequence[TierConfig],
    layers: Sequence[int],
    page: int,
    colds: dict[int, int],
) -> tuple[Tier, ...]:
    owner: dict[int, str] = {}
    for tier in tiers:
        for layer in tier.layers:
            if layer not in layers:
                raise ValueError(
                    f"tier '{tier.name}' names layer {layer}, which is not a full-attention layer "
                    f"of this model; those are {ranges(layers)}"
                )
            if layer in owner:
                raise ValueError(
                    f"layer {layer} is in two tiers, '{owner[layer]}' and '{tier.name}'"
                )
            owner[layer] = tier.name
    missing = [layer for layer in layers if layer not in owner]
    if missing:
        raise ValueError(f"no tier has the layers {ranges(missing)}: name them in one")
    return tuple(_tier_by_hand(config, tier, page, colds) for tier in tiers)


def _tier_by_hand(
    config: EvictionConfig, tier: TierConfig, page: int, colds: dict[int, int]
) -> Tier:
    window = config.window if tier.window is None else tier.window
    keep = config.keep if tier.keep is None else tier.keep
    bits = config.bits if tier.bits is None else tier.bits
    plan = _plan(config, tier.name, (page, colds[bits], bits), window, keep)
    return Tier(tier.layers, replace(plan, fixed=tier.keep is not None))


def _plan(
    config: EvictionConfig, name: str, pages: tuple[int, int, int], window: int, keep: float
) -> TierPlan:
    page, cold, bits = pages
    return TierPlan(
        name=name,
        page=page,
        cold=cold,
        segment=config.segment or automatic_segment(page, cold),
        interval=math.ceil(config.interval / page) * page,
        window=max(window, page),
        keep=0.0 if config.policy in ("sink", "window") else round(keep, 9),
        sinks=0 if config.policy == "window" else config.sinks,
        cap=config.cap,
        bits=bits,
    )


def ranges(numbers: Sequence[int]) -> str:
    """Format sorted integers as ranges: 0-5,24-29."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)
