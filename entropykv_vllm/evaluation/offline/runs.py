# SPDX-License-Identifier: Apache-2.0
"""Results case by case in one file, so that an interrupted run goes on where it stopped."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any


def resumed(
    path: Path,
    spec: Mapping[str, Any],
    count: int,
    produce: Callable[[int], Iterator[Any]],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Any]:
    """Return `count` results, those in the file first; the rest are produced and appended.

    Args:
        path: JSON lines: the specification, then one result a line.
        spec: what decides the results; a file of another one is begun anew.
        count: how many there are.
        produce: yields the results from a number on.
        progress: called with (done, count).
    """
    found = stored(path, spec)[:count]
    progress(len(found), count)
    if len(found) == count:
        return found
    _begin(path, spec, found)
    with path.open("a") as file:
        for result in produce(len(found)):
            file.write(json.dumps(result) + "\n")
            file.flush()
            found.append(result)
            progress(len(found), count)
            if len(found) == count:
                break
    return found


def stored(path: Path, spec: Mapping[str, Any]) -> list[Any]:
    """Return the results in a file of this very specification; a torn last line is left out."""
    if not path.is_file():
        return []
    first, *lines = path.read_text().split("\n")
    if json.loads(first or "null") != json.loads(json.dumps(spec)):
        return []
    return [json.loads(line) for line in lines[:-1]]


def _begin(path: Path, spec: Mapping[str, Any], found: list[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text("".join(json.dumps(item) + "\n" for item in [spec, *found]))
    part.replace(path)
