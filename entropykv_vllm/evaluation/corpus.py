# SPDX-License-Identifier: Apache-2.0
"""The English prose that needles are hidden in, sentence by sentence."""

import re
from importlib.resources import files

SENTENCE_END = re.compile(r"(?<=[.!?])(?=\s+[A-Z\"'])|(?<=[.!?]['\"])(?=\s+[A-Z\"'])")


def text() -> str:
    """Return all prose shipped with the package (about 64,000 tokens of SmolLM2)."""
    folder = files(__package__) / "text"
    return "\n".join((folder / name).read_text() for name in ("britannica.txt", "alice.txt"))


def sentences(prose: str) -> list[str]:
    """Cut prose into sentences; each keeps the white space before it, so they join to the prose."""
    return SENTENCE_END.split(prose)


def encode(tokenizer, prose: str | None = None) -> list[list[int]]:
    """Return the token ids of each sentence.

    Byte-level tokenizers never merge across the white space before a word, so sentences can be
    encoded one by one and put together again.
    """
    parts = sentences(text() if prose is None else prose)
    return [tokenizer.encode(part, add_special_tokens=False) for part in parts]
