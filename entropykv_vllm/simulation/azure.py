# SPDX-License-Identifier: Apache-2.0
"""Azure's traces of LLM inference: CSV files of arrival, prompt and answer.

https://github.com/Azure/AzurePublicDataset, AzureLLMInferenceDataset2023.md and -2024.md
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path

from entropykv_vllm.simulation.trace import LineError, Request, read_lines, tokens

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"


def read_azure(path: Path, lines: Iterable[tuple[int, str]], most: int | None) -> list[Request]:
    """Read the first `most` requests. They share nothing: the files do not say what was asked.

    Args:
        lines: number and text of each line that is not empty.

    Raises:
        ValueError: if the first line is not the header, or another is wrong.
    """
    rows = iter(lines)
    number, header = next(rows)
    if [name.strip() for name in header.split(",")] != HEADER.split(","):
        raise ValueError(
            f"line {number} of {path} is not the header of Azure's traces, {HEADER}, and no line "
            "of JSON, which Mooncake's have"
        )
    return read_lines(path, islice(rows, most), _request)


def _request(line: str) -> Request:
    cells = line.split(",")
    if len(cells) != 3:
        raise LineError(f"has {len(cells)} columns, not the 3 of the header")
    time, prompt, output = (cell.strip() for cell in cells)
    return Request(
        arrival=_seconds(time),
        prompt=tokens(_number(prompt), "ContextTokens", 1),
        output=max(1, tokens(_number(output), "GeneratedTokens", 0)),
    )


def _seconds(text: str) -> float:
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise LineError(f"has '{text}' for TIMESTAMP, not a date and time") from None
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()


def _number(text: str) -> int | str:
    try:
        return int(text) if text.removeprefix("-").isdecimal() else text
    except ValueError:  # of thousands of digits
        return text
