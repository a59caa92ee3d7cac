# SPDX-License-Identifier: Apache-2.0
"""Texts of one length out of the corpus, for measurements that read and go on reading."""

from __future__ import annotations


def cut(sentences: list[list[int]], count: int, tokens: int) -> list[list[int]]:
    """Take `count` texts of `tokens` tokens, their starts evenly spread over the corpus.

    Each starts with a sentence; at the end of the corpus it goes on at the front.
    """
    starts = [i * len(sentences) // count for i in range(count)]
    return [_from(sentences, start, tokens) for start in starts]


def _from(sentences: list[list[int]], start: int, tokens: int) -> list[int]:
    text: list[int] = []
    at = start
    while len(text) < tokens:
        text += sentences[at % len(sentences)]
        at += 1
    return text[:tokens]
