# SPDX-License-Identifier: Apache-2.0
"""Cells on probes: resumable, and summed up."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from entropykv_vllm.evaluation import identity
from entropykv_vllm.evaluation.calibration import probes
from entropykv_vllm.evaluation.calibration.probes import Loss
from entropykv_vllm.evaluation.offline import runs
from entropykv_vllm.evaluation.offline.cell import Cell, layout
from entropykv_vllm.evaluation.offline.model import Model
from entropykv_vllm.evaluation.tasks import Case


@dataclass(frozen=True)
class Texts:
    """The texts of a run: how many, how long, where numbers lie in them, and from which seed."""

    tokens: int
    count: int
    depths: tuple[float, float] = (0.0, 1.0)
    seed: int = 0


@dataclass(frozen=True)
class Summary:
    """A cell's mean losses over the probes.

    `held` is the share of a 16-bit cache's bytes that it holds at the end of a prompt.
    """

    cell: Cell
    held: float
    nll: float
    right: float
    kl: float


def run(
    net: Model,
    model: str,
    sentences: list[list[int]],
    texts: Texts,
    cells: Sequence[Cell],
    file: Path,
    progress: Callable[[int, int], None],
    dtype: str = "bfloat16",
) -> list[Summary]:
    """Return what each cell loses; the first is what the others are held to.

    `model` is the name or the folder of `net`.

    Raises:
        ValueError: settings that do not fit the model, in words.
    """
    kind = getattr(torch, dtype)
    layouts = [layout(cell, net, kind) for cell in cells]
    made = probes.make(net, sentences, texts.tokens, texts.count, texts.seed, texts.depths)

    def rest(done: int) -> Iterator[list[dict[str, Any]]]:
        for row in probes.losses(net, layouts, made[done:], kind):
            yield [asdict(loss) for loss in row]

    spec = _spec(net, model, sentences, texts, cells, dtype)
    rows = [
        [Loss(**x) for x in row] for row in runs.resumed(file, spec, texts.count, rest, progress)
    ]
    size = _prompt_tokens(made[0].case)
    return [
        Summary(cell, one.held(size, kind.itemsize), *_means([row[i] for row in rows]))
        for i, (cell, one) in enumerate(zip(cells, layouts, strict=True))
    ]


def _prompt_tokens(case: Case) -> int:
    """Tokens of a prompt to its end, where `entropykv eval` says what is held too."""
    return len(case.context + case.question + case.primer)


def _means(found: list[Loss]) -> tuple[float, float, float]:
    count = len(found)
    return (
        sum(loss.nll for loss in found) / count,
        sum(loss.right for loss in found) / count,
        sum(loss.kl for loss in found) / count,
    )


def _spec(
    net: Model,
    model: str,
    sentences: list[list[int]],
    texts: Texts,
    cells: Sequence[Cell],
    dtype: str,
) -> dict[str, Any]:
    from hashlib import sha256

    return {
        "model": Path(net.folder).name,
        **identity.marks(model),
        "text": sha256(repr(sentences).encode()).hexdigest()[:16],
        "texts": asdict(texts),
        "dtype": dtype,
        "cells": [[c.name, c.policy, dict(c.eviction), c.score] for c in cells],
    }
