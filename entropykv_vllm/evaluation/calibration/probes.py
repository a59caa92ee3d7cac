# SPDX-License-Identifier: Apache-2.0
"""What cells lose on a few texts: how surprised they are by a right answer, and by plain text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from entropykv_vllm.evaluation.divergence import kl
from entropykv_vllm.evaluation.offline.batches import batches
from entropykv_vllm.evaluation.offline.cell import Layout
from entropykv_vllm.evaluation.offline.model import Model
from entropykv_vllm.evaluation.offline.reading import Reading
from entropykv_vllm.evaluation.offline.session import Session
from entropykv_vllm.evaluation.tasks import TASKS, Case

#: The last tokens of a text, which are foretold as plain text.
PLAIN = 32


@dataclass(frozen=True)
class Probe:
    """A text, a question, and its right answer in token ids."""

    case: Case
    answer: list[int]


@dataclass(frozen=True)
class Loss:
    """What one cell made of one probe.

    `nll` is the surprise at the right answer in nats, over its tokens; `right` whether each of its
    tokens was the likeliest; `kl` the mean divergence of the next token of plain text from the full
    cache's, in nats.
    """

    nll: float
    right: bool
    kl: float


def make(
    net: Model,
    sentences: list[list[int]],
    tokens: int,
    count: int,
    seed: int,
    depths: tuple[float, float],
) -> list[Probe]:
    """Hide a number in each of `count` texts of `tokens` tokens."""
    cases = TASKS["needle"].build(net.tokenizer, sentences, tokens, count, seed, depths)
    return [Probe(case, _encode(net, case.answers[0])) for case in cases]


def _encode(net: Model, answer: str) -> list[int]:
    return net.tokenizer.encode(f" {answer}", add_special_tokens=False)


def losses(
    net: Model, layouts: Sequence[Layout], probes: Sequence[Probe], dtype: torch.dtype
) -> Iterator[list[Loss]]:
    """Yield, probe by probe, what each cell lost. The first is what the others are held to."""
    for one in probes:
        text = one.case.context
        reading = Reading(net, text[: -PLAIN - 1])
        plain = text[-PLAIN - 1 :]
        ids = plain + one.case.question + one.case.primer + one.answer
        rows = list(_foretold(net, reading, layouts, dtype, ids, len(one.answer)))
        yield [Loss(*_answered(row, one.answer), _divergence(rows[0], row)) for row in rows]


def _foretold(
    net: Model,
    reading: Reading,
    layouts: Sequence[Layout],
    dtype: torch.dtype,
    ids: list[int],
    answer: int,
) -> Iterator[Tensor]:
    """Yield each cell's log-probabilities of the plain text's tokens, then of the answer's."""
    rows: dict[int, Tensor] = {}
    for batch in batches(net, layouts, dtype, reading.tokens + len(ids)):
        session = Session(net, reading, [layouts[i] for i in batch], dtype, len(ids))
        hidden = session.read(torch.tensor([ids[:-1]] * len(batch)))
        wanted = torch.cat([hidden[:, :PLAIN], hidden[:, -answer:]], 1)
        rows |= zip(batch, net.logits(wanted).float().log_softmax(-1), strict=True)
    yield from (rows[i] for i in range(len(layouts)))


def _answered(row: Tensor, answer: list[int]) -> tuple[float, bool]:
    wanted, row = torch.tensor(answer), row[PLAIN:]
    nll = -row.gather(1, wanted[:, None]).mean()
    return round(float(nll), 6), bool((row.argmax(-1) == wanted).all())


def _divergence(full: Tensor, other: Tensor) -> float:
    return round(float(kl(full[:PLAIN], other[:PLAIN]).mean()), 9)
