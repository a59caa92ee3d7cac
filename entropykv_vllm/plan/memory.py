# SPDX-License-Identifier: Apache-2.0
"""What a model takes and what fits: the weights, one request in each cache, each card."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from entropykv_vllm.plan.cards import (
    FIXED,
    Serving,
    activation_bytes,
    overhead_bytes,
    room_bytes,
)
from entropykv_vllm.plan.model_shape import ModelShape
from entropykv_vllm.plan.pool import Pool
from entropykv_vllm.plan.sizes import MOST_TOKENS, show_bytes
from entropykv_vllm.plan.weights import parameters, weight_bytes

#: The longest length looked for if the model does not say what it reads.
LONGEST = 1 << 20

#: The name of vLLM's own cache.
FULL = "full, 16 bits"


@dataclass(frozen=True)
class Question:
    """What is asked: requests of `tokens` tokens, of which `answer` are generated, on `cards`.

    Attributes:
        weights: bytes of the weights.
        stored: how they are stored, in a word.
        cards: bytes of each card.
        room: bytes for pages, in place of cards; None to take what a card leaves.
    """

    tokens: int
    answer: int
    weights: int
    stored: str
    cards: Sequence[int]
    serving: Serving
    room: int | None = None


def check_question(shape: ModelShape, question: Question) -> None:
    """Refuse what cannot be.

    Raises:
        ValueError: if the request is longer than the model reads, or the only card asked about
            has no room for the weights; one sentence that says what to do.
    """
    longest, tokens = shape.positions, question.tokens
    if longest is not None and tokens > longest:
        raise ValueError(
            f"the model reads at most {longest:,} tokens, and --context asks for {tokens:,}: ask "
            "for less, or give --positions if you stretch its positions"
        )
    if question.room is None and len(question.cards) == 1:
        _check_card(shape, question, question.cards[0])


def _check_card(shape: ModelShape, question: Question, card: int) -> None:
    share = int(card * question.serving.utilization)
    overhead = overhead_bytes(shape, question.serving)
    if question.weights + overhead < share:
        return
    four = weight_bytes(shape, "int4")
    cures = ["a smaller model"]
    if question.weights + FIXED < share and question.serving.overhead is None:
        cures = ["fewer --max-num-seqs or --max-num-batched-tokens"]
    if four < question.weights and four + overhead < share:
        cures = [f"--weights int4 ({show_bytes(four)})", *cures]
    raise ValueError(
        f"the weights take {show_bytes(question.weights)} ({question.stored}), activations and "
        f"CUDA about {show_bytes(overhead)}, and vLLM has {show_bytes(share)} of a card of "
        f"{show_bytes(card)}: take {', '.join(['a larger card', *cures[:-1]])} or {cures[-1]}"
    )


def memory_report(
    name: str, shape: ModelShape, pools: Mapping[str, Pool], question: Question
) -> dict[str, Any]:
    """Return everything that is printed, as JSON has it.

    Args:
        name: of the model.
        pools: of each cache, by name; vLLM's own is `FULL`.
    """
    serving = question.serving
    full = pools[FULL].peak(question.tokens) * pools[FULL].page_bytes
    return {
        "model": name,
        "parameters": parameters(shape).total,
        "weights": question.stored,
        "weight_bytes": question.weights,
        "layers": shape.layers,
        "full_attention_layers": len(shape.full_layers),
        "kv_heads": shape.kv_heads,
        "head_size": shape.head_size,
        "positions": shape.positions,
        "tokens": question.tokens,
        "answer": question.answer,
        "gpu_memory_utilization": serving.utilization,
        "max_num_batched_tokens": serving.step_tokens,
        "max_num_seqs": serving.requests,
        "activation_bytes": activation_bytes(shape, serving),
        "fixed_bytes": FIXED,
        "overhead_bytes": overhead_bytes(shape, serving),
        "caches": [_cache(cache, pool, question, full) for cache, pool in pools.items()],
        "cards": [_card(shape, pools, question, card) for card in _cards(question)],
    }


def _cards(question: Question) -> Sequence[int | None]:
    return question.cards if question.room is None else [None]


def _cache(name: str, pool: Pool, question: Question, full: int) -> dict[str, Any]:
    held = pool.mean_held(question.tokens, question.answer)
    peak = pool.peak(question.tokens)
    return {
        "cache": name,
        "page_bytes": pool.page_bytes,
        "held_pages": held,
        "held_bytes": round(held * pool.page_bytes),
        "peak_pages": peak,
        "peak_bytes": peak * pool.page_bytes,
        "times_smaller": full / (peak * pool.page_bytes),
    }


def _card(
    shape: ModelShape, pools: Mapping[str, Pool], question: Question, card: int | None
) -> dict[str, Any]:
    room = question.room
    if room is None:
        assert card is not None
        overhead = overhead_bytes(shape, question.serving)
        room = room_bytes(card, question.weights, overhead, question.serving)
    limit = min(shape.positions or LONGEST, MOST_TOKENS)
    fits = [
        {
            "cache": name,
            "pages": pool.usable(room),
            "longest": pool.longest(room, limit),
            "requests": pool.requests(room, question.tokens),
        }
        for name, pool in pools.items()
    ]
    return {"card_bytes": card, "room_bytes": room, "fits": fits}
