# SPDX-License-Identifier: Apache-2.0
"""Progress bars on standard error, where a terminal shows it; and how far a part of the work is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any


def bar(work: int | Iterable[Any], unit: str, about: str | None = None) -> Any:
    """Return a tqdm bar over so much work, or over the parts of it; silent without a terminal."""
    from tqdm import tqdm

    what = {"total": work} if isinstance(work, int) else {"iterable": work}
    return tqdm(**what, unit=unit, desc=about, disable=None)


def complain(text: str) -> None:
    """Print what went wrong to standard error, above a bar if there is one."""
    import sys

    from tqdm import tqdm

    tqdm.write(text, file=sys.stderr)


def onto(shown: Any, before: int = 0) -> Callable[[int, int], None]:
    """Return a function of (done, total) that moves a tqdm bar to `before + done`."""

    def progress(done: int, total: int) -> None:
        shown.update(before + done - shown.n)

    return progress
