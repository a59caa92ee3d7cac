# SPDX-License-Identifier: Apache-2.0
"""How far many cells' next-token distributions are from those of the full cache."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from entropykv_vllm.evaluation import divergence, engines
from entropykv_vllm.evaluation.offline.batches import batches
from entropykv_vllm.evaluation.offline.cell import Cell, Layout, layout
from entropykv_vllm.evaluation.offline.model import Model
from entropykv_vllm.evaluation.offline.reading import Reading
from entropykv_vllm.evaluation.offline.session import Session

FULL = Cell("full cache", "none")


def measure(
    model: str | Model,
    cells: Sequence[Cell],
    texts: Sequence[list[int]],
    prompt_tokens: int,
    dtype: str = "bfloat16",
) -> list[dict[str, Any]]:
    """Let every cell go on with every text's own next tokens.

    Args:
        model: a model's folder or name, or a loaded one.
        cells: the settings that are compared, each with a full float32 cache.
        texts: token ids, prompts and what follows them.
        prompt_tokens: the length of the prompts.
        dtype: of the cells' hot pages.

    Returns:
        For each cell ``kl`` and ``top1`` as `divergence.summary` gives them, ``perplexity`` of
        what follows the prompts, and ``texts``: the values of each step.
    """
    net = model if isinstance(model, Model) else Model(engines.model_folder(model))
    found = list(each(net, cells, texts, prompt_tokens, dtype))
    return [summary(column) for column in zip(*found, strict=True)]


Values = dict[str, list[float]]


def each(
    net: Model,
    cells: Sequence[Cell],
    texts: Sequence[list[int]],
    prompt_tokens: int,
    dtype: str = "bfloat16",
) -> Iterator[list[Values]]:
    """As `measure`, text by text: the values of each step, of each cell."""
    kind = getattr(torch, dtype)
    layouts = [layout(cell, net, kind) for cell in cells]
    for ids in texts:
        # The last token of the prompt is read again by all: what follows it is the first step.
        reading = Reading(net, ids[: prompt_tokens - 1])
        forced = ids[prompt_tokens - 1 :]
        full = _follow(net, reading, [layout(FULL, net, torch.float32)], torch.float32, forced)[0]
        found: list[Values] = [{} for _ in cells]
        for batch in batches(net, layouts, kind, len(ids)):
            rows = _follow(net, reading, [layouts[i] for i in batch], kind, forced)
            for i, row in zip(batch, rows, strict=True):
                found[i] = {**divergence.compare(full, row), "nll": _surprise(row, forced)}
        yield found


def summary(texts: Sequence[Values]) -> dict[str, Any]:
    """Return what `measure` says of a cell."""
    found = list(texts)
    return {**divergence.summary(found), "perplexity": _perplexity(found), "texts": found}


def _follow(net, reading, layouts: list[Layout], dtype, forced: list[int]) -> Tensor:
    """Log-probabilities ``[cells, steps, vocabulary]`` after each token but the last."""
    session = Session(net, reading, layouts, dtype, len(forced))
    hidden = session.read(torch.tensor([forced[:-1]] * len(layouts)))
    return net.logits(hidden).float().log_softmax(-1)


def _surprise(row: Tensor, forced: list[int]) -> list[float]:
    """Minus the log-probability of each token that follows."""
    right = torch.tensor(forced[1:])[:, None]
    return [round(-value, 6) for value in row.gather(1, right)[:, 0].tolist()]


def _perplexity(texts: list[dict[str, list[float]]]) -> float:
    values = [value for text in texts for value in text["nll"]]
    return math.exp(sum(values) / len(values))
