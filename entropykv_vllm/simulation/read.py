# SPDX-License-Identifier: Apache-2.0
"""Reading the file of a trace, whichever of the known formats it has."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from entropykv_vllm.simulation.azure import read_azure
from entropykv_vllm.simulation.mooncake import read_mooncake
from entropykv_vllm.simulation.trace import Request


def read_trace(path: Path, most: int | None = None) -> list[Request]:
    """Read the first `most` requests of a trace in Azure's format or Mooncake's.

    Raises:
        ValueError: if the file cannot be read, or a line is wrong; it names the line.
    """
    try:
        with path.open(encoding="utf-8-sig") as file:
            lines = _lines(file)
            first = next(lines, None)
            if first is None:
                raise ValueError(f"{path} is empty")
            read = read_mooncake if first[1].startswith("{") else read_azure
            return read(path, chain([first], lines), most)
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not a text file") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None


def _lines(file: Iterator[str]) -> Iterator[tuple[int, str]]:
    """Number and text of each line that is not empty."""
    for number, line in enumerate(file, 1):
        if text := line.strip():
            yield number, text
