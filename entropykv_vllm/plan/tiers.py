# SPDX-License-Identifier: Apache-2.0
"""Which layers share a tier, and the geometry of each tier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from entropykv_vllm.config.settings import EvictionConfig, TierConfig
from entropykv_vllm.plan import lara
from entropykv_vllm.plan.schedule import TierPlan

#: The share of the layers that LARA's early tier takes, and its late tier.
EDGE = Fraction(1, 5)


@dataclass(frozen=True)
class Tier:
    """A set of layers (by their index in the whole model) with one plan."""

    layers: tuple[int, ...]
    plan: TierPlan


def make_tiers(config: EvictionConfig, layers: Sequence[int], page: int) -> tuple[Tier, ...]:
    """Cut the full-attention layers of a model into tiers.

    Args:
        config: the validated settings.
        layers: the indices of the layers with full attention, in the whole model.
        page: tokens per page.

    Raises:
        ValueError: if the settings do not fit the model or the page size, in words.
    """
    if not layers:
        raise ValueError("the model has no full-attention layer, so there is nothing to evict")
    _check_lengths(config, page)
    if config.tiers is not None:
        return _tiers_by_hand(config, config.tiers, layers, page)
    return _lara_tiers(config, layers, page)


def _check_lengths(config: EvictionConfig, page: int) -> None:
    for name in ("segment", "interval", "cap"):
        value = getattr(config, name)
        if value is not None and value % page:
            raise ValueError(
                f"{name} must be a multiple of the page size, and {value} is not one of {page}: "
                f"set --block-size or kv-eviction-config.{name}"
            )
    if config.sinks > page:
        raise ValueError(f"sinks must fit one page of {page} tokens, and {config.sinks} do not")


def group_size(layers: int) -> int:
    """Layers per page group when early and late tiers take about `EDGE` of the layers each.

    It divides the number of layers, so vLLM gets groups of equal size without padding.
    """
    divisors = [d for d in range(1, layers + 1) if layers % d == 0 and layers // d >= 3]
    return min(divisors, key=lambda d: (abs(d - EDGE * layers), d), default=layers)


def _lara_tiers(config: EvictionConfig, layers: Sequence[int], page: int) -> tuple[Tier, ...]:
    count = len(layers)
    edge = group_size(count)
    uniform = config.lara_window == 0 and config.lara_keep == 0
    if uniform or count < 3 * edge:
        plan = _plan(config, "all", page, config.window, config.keep, config.bits)
        return (Tier(tuple(layers), plan),)
    cuts = {"early": (0, edge), "middle": (edge, count - edge), "late": (count - edge, count)}
    shape = lara.curve(count)
    means = [sum(shape[a:b]) / (b - a) for a, b in cuts.values() for _ in range(a, b)]
    limit = _window_limits(config, page)
    windows = lara.allocate(config.window, config.lara_window, means, *limit)
    keeps = lara.allocate(config.keep, config.lara_keep, means, 0.0, 1.0)
    return tuple(
        Tier(
            tuple(layers[a:b]),
            _plan(config, name, page, round(windows[a]), keeps[a], config.bits),
        )
        for name, (a, b) in cuts.items()
    )


def _window_limits(config: EvictionConfig, page: int) -> tuple[float, float]:
    return min(page, config.window), float("inf")


def _tiers_by_hand(
    config: EvictionConfig, tiers: Sequence[TierConfig], layers: Sequence[int], page: int
) -> tuple[Tier, ...]:
    owner: dict[int, str] = {}
    for tier in tiers:
        for layer in tier.layers:
            if layer not in layers:
                raise ValueError(
                    f"tier '{tier.name}' names layer {layer}, which is not a full-attention layer "
                    f"of this model; those are {_ranges(layers)}"
                )
            if layer in owner:
                raise ValueError(
                    f"layer {layer} is in two tiers, '{owner[layer]}' and '{tier.name}'"
                )
            owner[layer] = tier.name
    missing = [layer for layer in layers if layer not in owner]
    if missing:
        raise ValueError(f"no tier has the layers {_ranges(missing)}: name them in one")
    return tuple(_tier_by_hand(config, tier, page) for tier in tiers)


def _tier_by_hand(config: EvictionConfig, tier: TierConfig, page: int) -> Tier:
    window = config.window if tier.window is None else tier.window
    keep = config.keep if tier.keep is None else tier.keep
    bits = config.bits if tier.bits is None else tier.bits
    return Tier(tier.layers, _plan(config, tier.name, page, window, keep, bits))


def _plan(
    config: EvictionConfig, name: str, page: int, window: int, keep: float, bits: int
) -> TierPlan:
    return TierPlan(
        name=name,
        page=page,
        segment=config.segment,
        interval=config.interval,
        window=max(window, page),
        keep=0.0 if config.policy in ("sink", "window") else round(keep, 9),
        sinks=0 if config.policy == "window" else config.sinks,
        cap=config.cap,
        bits=bits,
    )


def _ranges(numbers: Sequence[int]) -> str:
    """Format sorted integers as ranges: 0-5,24-29."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)
