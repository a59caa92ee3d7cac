# SPDX-License-Identifier: Apache-2.0
"""Texts of one length out of the corpus, for measurements that read and go on reading."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def opening(tokenizer: Any) -> list[int]:
    """Return the token that the model's prompts start with, if there is one."""
    return [token for token in tokenizer.encode("") if token == tokenizer.bos_token_id]


def cut(
    sentences: list[list[int]], count: int, tokens: int, first: Sequence[int]
) -> list[list[int]]:
    """Take `count` texts of `tokens` tokens, their starts evenly spread over the corpus.

    Each starts with the tokens `first` (the model's `opening`) and a sentence; at the end of the
    corpus it goes on at the front.
    """
    starts = [i * len(sentences) // count for i in range(count)]
    return [_from(sentences, start, tokens, first) for start in starts]


def _from(sentences: list[list[int]], start: int, tokens: int, first: Sequence[int]) -> list[int]:
    text = list(first)
    at = start
    while len(text) < tokens:
        text += sentences[at % len(sentences)]
        at += 1
    return text[:tokens]
