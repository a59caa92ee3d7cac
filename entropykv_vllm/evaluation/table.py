# SPDX-License-Identifier: Apache-2.0
"""Tables that read well in a terminal and are Markdown too."""

from itertools import groupby


def render(header: list[str], rows: list[list[str]]) -> str:
    """Return an aligned Markdown table; all columns but the first are set to the right."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    rule = ["-" * widths[0]] + ["-" * (width - 1) + ":" for width in widths[1:]]
    lines = [_line(header, widths), "| " + " | ".join(rule) + " |"]
    return "\n".join(lines + [_line(row, widths) for row in rows])


def _line(row: list[str], widths: list[int]) -> str:
    first = row[0].ljust(widths[0])
    rest = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
    return "| " + " | ".join([first, *rest]) + " |"


def records(text: str) -> list[dict[str, str]]:
    """Return the rows of the tables that `render` made in a text, as they are headed there."""
    found: list[dict[str, str]] = []
    for is_table, lines in groupby(text.splitlines(), lambda line: line.startswith("|")):
        if is_table:
            header, _, *rows = ([cell.strip() for cell in x.split("|")[1:-1]] for x in lines)
            found += [dict(zip(header, row, strict=True)) for row in rows]
    return found


def percent(share: float) -> str:
    """Write a share as a whole percentage."""
    return f"{100 * share:.0f}"


def interval(estimate: list[float]) -> str:
    """Write `[share, low, high]` as a percentage with its 95 % interval."""
    share, low, high = estimate
    return f"{percent(share)} ({percent(low)}-{percent(high)})"
