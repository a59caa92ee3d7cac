# SPDX-License-Identifier: Apache-2.0
"""What the kernel benchmark measures: head shapes, page formats, lengths, bytes."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from entropykv_vllm.plan.capacity import capacity, head_bytes, quantized_bytes
from entropykv_vllm.plan.tiers import automatic_segment

ITEM = 2  # bytes of a bfloat16

#: Page sizes of vLLM's kernel; its better one counts.
VLLM_PAGES = (32, 128)


class Format(NamedTuple):
    """How our cold pages are stored, and how many tokens a hot page has."""

    bits: int
    page: int


FORMATS = (Format(16, 32), Format(8, 64), Format(4, 32))


class Shape(NamedTuple):
    """Heads of an attention layer."""

    query_heads: int
    heads: int  # KV heads
    size: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Read `query heads/KV heads/head size`."""
        try:
            shape = cls(*map(int, text.split("/")))
        except (TypeError, ValueError):
            raise ValueError(f"a head shape is like 32/8/128, not {text}") from None
        if min(shape) < 1 or shape.query_heads % shape.heads or shape.size % 16:
            raise ValueError(f"{text} is no head shape of grouped attention that the kernels take")
        return shape

    def __str__(self) -> str:
        return "/".join(map(str, self))

    def page_bytes(self, page: int) -> int:
        """Bytes of a page of `page` tokens of 16 bits: hot ones, and cold ones of any format."""
        return self.heads * head_bytes(self.size, page, ITEM)


@dataclass(frozen=True)
class Case:
    """Sequences of equal length whose last `queries` tokens ask, all others are their context."""

    part: str  # decode or prefill
    shape: Shape
    sequences: int
    context: int
    queries: int = 1

    @property
    def tokens(self) -> int:
        return self.context + self.queries

    @property
    def total_bytes(self) -> int:
        """Bytes of all keys and values in 16 bits."""
        return self.sequences * self.tokens * self.shape.page_bytes(1)

    @property
    def formats(self) -> tuple[Format, ...]:
        """Formats that differ: without a context there is nothing to store in fewer bits."""
        return FORMATS if self.context else FORMATS[:1]

    def values(self) -> dict[str, Any]:
        """The case as JSON."""
        return {**asdict(self), "shape": str(self.shape), "tokens": self.tokens}


class Pages(NamedTuple):
    """Pages of one sequence."""

    cold: int
    hot_tokens: int
    total: int  # cold and hot


def cold_tokens(shape: Shape, kind: Format) -> int:
    """Tokens in a cold page."""
    return capacity(shape.size, kind.page, ITEM, kind.bits)


def pages(case: Case, kind: Format) -> Pages:
    """Put what fills cold pages of the context into them; the rest and the queries are hot."""
    room = cold_tokens(case.shape, kind)
    cold = case.context // room
    hot = case.tokens - cold * room
    return Pages(cold, hot, cold + -(-hot // kind.page))


def bytes_read(case: Case, kind: Format) -> int:
    """Bytes of keys, values, scales and zeros that one call must read at least once."""
    shape, held = case.shape, pages(case, kind)
    if kind.bits == 16:
        return case.total_bytes
    cold = quantized_bytes(cold_tokens(shape, kind), shape.size, kind.bits) * shape.heads
    return case.sequences * (held.cold * cold + held.hot_tokens * shape.page_bytes(1))


def sets(megabytes: float, set_bytes: int) -> int:
    """Sets of pages that together are at least as large as a pool should be."""
    return max(1, math.ceil(megabytes * 1e6 / set_bytes))


def segment(shape: Shape, kind: Format) -> tuple[int, int]:
    """Hot pages of a segment as the plugin's, and cold pages that hold half of its tokens."""
    room = cold_tokens(shape, kind)
    tokens = automatic_segment(kind.page, 2 * room)
    return tokens // kind.page, tokens // (2 * room)


def decode_cases(spec: dict[str, Any]) -> list[Case]:
    """All combinations of one query a sequence."""
    return [
        Case("decode", Shape.parse(shape), sequences, tokens - 1)
        for shape in spec["shapes"]
        for sequences in spec["sequences"]
        for tokens in spec["tokens"]
    ]


def prefill_cases(spec: dict[str, Any]) -> list[Case]:
    """One sequence, a chunk of queries after each context."""
    return [
        Case("prefill", Shape.parse(shape), 1, context, spec["queries"])
        for shape in spec["shapes"]
        for context in spec["contexts"]
    ]


def cases(spec: dict[str, Any]) -> tuple[list[Case], list[Case]]:
    """The attention cases of a run, and those left out because their pool would be too large."""
    every: list[Case] = []
    if "decode" in spec["parts"]:
        every += decode_cases(spec)
    if "prefill" in spec["parts"]:
        every += prefill_cases(spec)
    fits = [case for case in every if case.total_bytes <= spec["memory"] * 1e9]
    return fits, [case for case in every if case not in fits]
