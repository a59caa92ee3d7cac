# SPDX-License-Identifier: Apache-2.0
"""A trace: when requests come, how long they are, and what they share."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

#: The largest number of a trace or a flag; far beyond it floats fail.
MOST = 10**12

#: The latest arrival, in seconds: thirty thousand years, in which a step can still be told.
LATEST = 10**12


@dataclass(frozen=True, slots=True)
class Request:
    """A request of a trace; all lengths in tokens.

    Attributes:
        arrival: seconds since the first request came.
        prompt: the length of its prompt.
        output: that of its answer.
        shared: the parts of its prompt that other requests may begin with as well: where each
            ends, and a number for all there is up to that end, which equal prefixes have in
            common. What comes after the last is the request's own.
    """

    arrival: float
    prompt: int
    output: int
    shared: tuple[tuple[int, int], ...] = ()

    @property
    def length(self) -> int:
        """Prompt and answer."""
        return self.prompt + self.output


def page_names(request: Request, number: int, page: int) -> list[int]:
    """A number for each page that a request fills, the same where all tokens up to it are.

    Args:
        number: of the request in its trace.
        page: tokens of a page.
    """
    names: list[int] = []
    last = request.length
    for end, prefix in (*request.shared, (last, -1 - number)):
        first = (len(names) + 1) * page
        names += (prefix << 32 | place for place in range(first, end + 1, page))
    return names


class LineError(ValueError):
    """What is wrong with a line of a trace."""


def read_lines(
    path: Path, lines: Iterable[tuple[int, str]], read: Callable[[str], Request]
) -> list[Request]:
    """Read the requests of a trace in the order in which they came, the first one at 0.

    Raises:
        ValueError: if a line is wrong; it names the line and says what is.
    """
    requests = []
    for number, line in lines:
        try:
            requests.append(read(line))
        except LineError as error:
            raise ValueError(f"line {number} of {path} {error}: {_short(line)}") from None
    if not requests:
        raise ValueError(f"{path} has no requests")
    return in_order(requests)


def in_order(requests: Iterable[Request]) -> list[Request]:
    """Requests by their arrival, the first one at 0."""
    found = sorted(requests, key=lambda request: request.arrival)
    start = found[0].arrival
    return [Request(one.arrival - start, one.prompt, one.output, one.shared) for one in found]


def whole(value: object, what: str, least: int) -> int:
    """A number of a line.

    Raises:
        LineError: if it is not a whole number, or less than `least`.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise LineError(f"has {shown(value)} for {what}, not a whole number")
    if value < least:
        raise LineError(f"has {shown(value)} for {what}, which must be {least} or more")
    return value


def tokens(value: object, what: str, least: int) -> int:
    """A number of tokens of a line.

    Raises:
        LineError: as `whole`, or if no request can have so many.
    """
    count = whole(value, what, least)
    if count > MOST:
        raise LineError(f"has {shown(value)} for {what}, which must be {MOST:,} or less")
    return count


def shown(value: object) -> str:
    """What stands in a line, as a sentence about it shows it."""
    return _short(json.dumps(value, ensure_ascii=False))


def _short(line: str) -> str:
    return line if len(line) <= 80 else f"{line[:80]}..."
