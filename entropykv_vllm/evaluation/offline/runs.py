# SPDX-License-Identifier: Apache-2.0
"""Results case by case in one file, so that an interrupted run goes on where it stopped."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from entropykv_vllm.errors import RunError


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
        spec: what decides the results; a file of another one is set aside, which is said.
        count: how many there are.
        produce: yields the results from a number on.
        progress: called with (done, count).

    Raises:
        RunError: if a line of the file is no JSON, in one sentence.
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
    """Return the results in a file of this very specification; a torn last line is left out.

    Raises:
        RunError: if another line is no JSON, in one sentence.
    """
    if not is_of(path, spec):
        return []
    lines = path.read_text(errors="replace").split("\n")[1:-1]
    while lines and not lines[-1].strip():
        del lines[-1]
    return [_value(path, number, line) for number, line in enumerate(lines, 2)]


def is_of(path: Path, spec: Mapping[str, Any]) -> bool:
    """Whether there is such a file, and what is in it is of this very specification."""
    if not path.is_file():
        return False
    try:
        with path.open() as file:
            return bool(json.loads(file.readline()) == json.loads(json.dumps(spec)))
    except ValueError:
        return False


def _value(path: Path, number: int, line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        raise RunError(
            f"{path}, line {number}, is no JSON: mend it, or delete it and all lines after it"
        ) from None


def _begin(path: Path, spec: Mapping[str, Any], found: list[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_file() and not is_of(path, spec):
        old = _aside(path)
        path.rename(old)
        print(f"{path} was of another specification, and is {old.name} now", file=sys.stderr)
    part = path.with_suffix(".part")
    part.write_text("".join(json.dumps(item) + "\n" for item in [spec, *found]))
    part.replace(path)


def _aside(path: Path) -> Path:
    """A name beside a file that no other file has."""
    old, number = Path(f"{path}.old"), 1
    while old.exists():
        number += 1
        old = Path(f"{path}.old{number}")
    return old
