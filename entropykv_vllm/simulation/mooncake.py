# SPDX-License-Identifier: Apache-2.0
"""Mooncake's traces: a line of JSON for each request, with a number for each block of its prompt.

https://github.com/kvcache-ai/Mooncake, FAST25-release/traces
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

from entropykv_vllm.simulation.trace import (
    LATEST,
    LineError,
    Request,
    read_lines,
    shown,
    tokens,
    whole,
)

#: Tokens of a block.
BLOCK = 512


def read_mooncake(path: Path, lines: Iterable[tuple[int, str]], most: int | None) -> list[Request]:
    """Read the first `most` requests; those whose blocks begin alike share that much.

    Args:
        lines: number and text of each line that is not empty.

    Raises:
        ValueError: if a line is wrong; it names the line and says what is.
    """
    prefixes: dict[tuple[int, int], int] = {}
    return read_lines(path, islice(lines, most), lambda line: _request(line, prefixes))


def _request(line: str, prefixes: dict[tuple[int, int], int]) -> Request:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise LineError(f"is not JSON ({getattr(error, 'msg', error)})") from None
    if not isinstance(row, dict):
        raise LineError("is not an object")
    for key in ("timestamp", "input_length", "output_length", "hash_ids"):
        if key not in row:
            raise LineError(f"has no {key}")
    prompt = tokens(row["input_length"], "input_length", 1)
    return Request(
        arrival=_milliseconds(row["timestamp"]) / 1000,
        prompt=prompt,
        output=max(1, tokens(row["output_length"], "output_length", 0)),
        shared=_shared(row["hash_ids"], prompt, prefixes),
    )


def _milliseconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise LineError(f"has {shown(value)} for timestamp, not a number of milliseconds")
    if not 0 <= value <= 1000 * LATEST:
        raise LineError(
            f"has {shown(value)} for timestamp, which must be from 0 to {1000 * LATEST:,} "
            "milliseconds"
        )
    return value


def _shared(
    blocks: Any, prompt: int, prefixes: dict[tuple[int, int], int]
) -> tuple[tuple[int, int], ...]:
    """Where each block ends, and a number for the blocks up to it."""
    count = -(-prompt // BLOCK)
    if not isinstance(blocks, list) or len(blocks) != count:
        found = f"{len(blocks)}" if isinstance(blocks, list) else "no list"
        raise LineError(
            f"has {found} for hash_ids, and a prompt of {prompt:,} tokens has {count} of {BLOCK}"
        )
    shared, prefix = [], 0
    for i, block in enumerate(blocks):
        key = prefix, whole(block, "an entry of hash_ids", 0)
        prefix = prefixes.setdefault(key, len(prefixes) + 1)
        shared.append((min((i + 1) * BLOCK, prompt), prefix))
    return tuple(shared)
