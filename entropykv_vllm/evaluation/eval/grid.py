# SPDX-License-Identifier: Apache-2.0
"""The settings that a table compares: a full cache, policies by keep ratio and bits, presets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from entropykv_vllm.config.settings import EvictionConfig, load
from entropykv_vllm.evaluation import engines, presets


@dataclass(frozen=True)
class Setting:
    """One cell of each task: `name` in files, the `series` that it belongs to in the picture."""

    name: str
    series: str
    policy: str
    keep: float | None = None
    bits: int | None = None
    eviction: dict[str, Any] = field(default_factory=dict)

    def config(self) -> EvictionConfig:
        """Return the validated settings; the policy is none of the controls'.

        Raises:
            ValueError: if they are wrong, in one sentence.
        """
        base = {} if "preset" in self.eviction else engines.BASE
        return load(self.policy, {**base, **self.eviction})


FULL = Setting("full", "full cache", "none", 1.0, 16)


def settings(
    policies: Sequence[str],
    keeps: Sequence[float],
    bits: Sequence[int],
    names: str,
    config: Mapping[str, Any],
    tokens: int,
) -> list[Setting]:
    """Return the full cache, the grid, and the presets as they are, for prompts of a length.

    Raises:
        ValueError: if a name or a setting is wrong, in one sentence.
    """
    _check(keeps, bits)
    found = [FULL, *_grid(policies, keeps, bits, config, tokens), *_presets(names)]
    for setting in found[1:]:
        setting.config()
    return found


def _check(keeps: Sequence[float], bits: Sequence[int]) -> None:
    """Refuse what a part of the grid would leave out without a word."""
    for keep in keeps:
        if not 0 < keep <= 1:
            raise ValueError(f"keep is {keep:g}: a share is more than 0, and at most 1")
    for number in bits:
        if number not in (16, 8, 4):
            raise ValueError(f"bits is {number}: there are 16, 8 and 4")


def _grid(
    policies: Sequence[str],
    keeps: Sequence[float],
    bits: Sequence[int],
    config: Mapping[str, Any],
    tokens: int,
) -> Iterator[Setting]:
    """All combinations but those that keep everything in 16 bits, which is the full cache."""
    for policy in policies:
        for keep in keeps:
            for number in (16,) if policy in engines.WINDOW_ONLY else bits:
                if keep < 1 or number < 16:
                    asked = engines.eviction(policy, keep, tokens, {**config, "bits": number})
                    yield Setting(
                        f"{policy}-{keep:g}-{number}", policy, policy, keep, number, asked
                    )


def _presets(names: str) -> Iterator[Setting]:
    for name, (policy, eviction) in presets.chosen(names).items():
        config = load(policy, eviction)
        keep = None if policy in engines.WINDOW_ONLY else config.keep
        yield Setting(name, "presets", policy, keep, config.bits, eviction)
