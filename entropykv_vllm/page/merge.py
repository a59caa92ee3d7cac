# SPDX-License-Identifier: Apache-2.0
"""One answer out of those of all workers, which have other heads or other layers.

An answer is what `serving.view.View` gives; all workers know the same requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Answer = Mapping[str, Any]


def tiers(answers: Sequence[Sequence[Answer]]) -> list[dict[str, Any]]:
    """The tiers in the order of their first layers, with the layers of all workers."""
    merged: dict[str, dict[str, Any]] = {}
    for group in (group for answer in answers for group in answer):
        tier = merged.setdefault(group["name"], {**group, "layers": []})
        tier["layers"] = sorted({*tier["layers"], *group["layers"]})
    for tier in merged.values():
        tier.pop("heads")
    return sorted(merged.values(), key=lambda tier: tier["layers"][:1])


@dataclass
class Held:
    """What a tier holds of a request: `tokens` in all, and each of those from `hot` on.

    `bands` are stretches of older ones and the share of each that is kept; `shares`, a byte for
    each old token, is 255 where all layers and heads hold it. None: not told, or not known.
    """

    hot: int
    tokens: int
    bands: list[list[float]] | None
    shares: bytes | None


@dataclass
class Told:
    """What the workers say of a request.

    `serial` and `at` are to be sent along with the next question if it was told `whole`: then only
    what has changed since is told again.
    """

    serial: int
    at: int
    end: int
    whole: bool
    tiers: dict[str, Held]


def told(answers: Sequence[Answer], request_id: str) -> Told | None:
    """What is held of a request; None if a worker does not know it."""
    found = [answer["held"].get(request_id) for answer in answers]
    if not found or None in found:
        return None
    groups = [group for answer in found for group in answer["groups"]]
    by_tier: dict[str, list[Answer]] = {}
    for group in groups:
        by_tier.setdefault(group["tier"], []).append(group)
    return Told(
        found[0]["serial"],
        # A worker may be a step ahead of one of another stage.
        min(answer["at"] for answer in found),
        min(answer["end"] for answer in found),
        all("bands" in group for group in groups),
        {name: _held(some) for name, some in by_tier.items()},
    )


def _held(groups: Sequence[Answer]) -> Held:
    first = min(groups, key=lambda group: group["hot"])
    return Held(first["hot"], first["tokens"], first.get("bands"), _shares(groups, first["hot"]))


def _shares(groups: Sequence[Answer], old: int) -> bytes | None:
    counted = [group for group in groups if group["pairs"]]
    if not counted or any(group.get("counts") is None for group in counted):
        return None
    held = sum(np.frombuffer(group["counts"], np.uint16)[:old].astype(float) for group in counted)
    pairs = sum(group["pairs"] for group in counted)
    shares: bytes = (held * 255 / pairs).round().astype(np.uint8).tobytes()
    return shares
