# SPDX-License-Identifier: Apache-2.0
"""Answers of many cells to the same questions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from entropykv_vllm.evaluation import engines
from entropykv_vllm.evaluation.offline.batches import batches
from entropykv_vllm.evaluation.offline.cell import Cell, Layout, layout
from entropykv_vllm.evaluation.offline.model import Model
from entropykv_vllm.evaluation.offline.reading import Reading
from entropykv_vllm.evaluation.offline.session import Session

Progress = Callable[[int, int], None]


@dataclass
class CellResult:
    """A cell's answers, and the bytes that it held over those of a full 16-bit cache: the mean."""

    answers: list[str] = field(default_factory=list)
    held: float = 0.0


def answer(
    model: str | Model,
    cells: Sequence[Cell],
    cases: Sequence[Any],
    answer_tokens: int,
    aware: bool = False,
    progress: Progress = lambda done, total: None,
    dtype: str = "bfloat16",
) -> list[CellResult]:
    """Let every cell answer every case, greedily.

    Args:
        model: a model's folder or name, or a loaded one.
        cells: the settings that are compared.
        cases: each with token ids `context`, `question` and `primer`.
        answer_tokens: the most tokens of an answer.
        aware: read the question before anything is compressed, and compress once, after it; else
            the context is compressed as it is read, and then comes the question.
        progress: called with (answers done, all answers).
        dtype: of the cache's hot pages.

    Raises:
        ValueError: settings that do not fit the model, in words.
    """
    net = model if isinstance(model, Model) else Model(engines.model_folder(model))
    results = [CellResult() for _ in cells]
    for done, found in enumerate(each(net, cells, cases, answer_tokens, aware, dtype), 1):
        for result, (text, held) in zip(results, found, strict=True):
            result.answers.append(text)
            result.held += (held - result.held) / done
        progress(done * len(cells), len(cases) * len(cells))
    return results


def each(
    net: Model,
    cells: Sequence[Cell],
    cases: Sequence[Any],
    answer_tokens: int,
    aware: bool = False,
    dtype: str = "bfloat16",
) -> Iterator[list[tuple[str, float]]]:
    """As `answer`, case by case: each cell's answer and the share of bytes that it held."""
    kind = getattr(torch, dtype)
    for case in cases:
        seen = case.context + case.question * aware
        asked = case.question * (not aware) + case.primer
        interval = len(seen) if aware else None
        layouts = [layout(cell, net, kind, interval) for cell in cells]
        texts = _answer_case(net, layouts, seen, asked, answer_tokens, kind)
        size = len(seen) + len(asked)
        yield [(t, one.held(size, kind.itemsize)) for t, one in zip(texts, layouts, strict=True)]


def _answer_case(
    net: Model, layouts: list[Layout], seen: list[int], asked: list[int], most: int, dtype
) -> list[str]:
    reading = Reading(net, seen)
    texts = [""] * len(layouts)
    for batch in batches(net, layouts, dtype, len(seen) + len(asked) + most):
        group = [layouts[i] for i in batch]
        session = Session(net, reading, group, dtype, len(asked) + most)
        for i, text in zip(batch, decode(net, session, asked, most), strict=True):
            texts[i] = text
    return texts


def decode(net: Model, session: Session, asked: list[int], most: int) -> list[str]:
    """Read `asked` in all cells of a session and answer greedily, with at most `most` tokens."""
    stops = torch.tensor(sorted(net.stops()))
    hidden = session.read(torch.tensor([asked] * session.cells))
    found = [net.logits(hidden[:, -1]).argmax(-1)]
    ended = torch.isin(found[0], stops)
    while len(found) < most and not ended.all():
        hidden = session.read(found[-1][:, None])
        found.append(net.logits(hidden[:, -1]).argmax(-1))
        ended |= torch.isin(found[-1], stops)
    return [_text(net, row.tolist()) for row in torch.stack(found, 1)]


def _text(net: Model, ids: list[int]) -> str:
    end = next((i for i, token in enumerate(ids) if token in net.stops()), len(ids))
    return net.tokenizer.decode(ids[:end])
