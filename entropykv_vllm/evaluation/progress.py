# SPDX-License-Identifier: Apache-2.0
"""Progress bars that are told how far a part of the work is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def onto(bar: Any, before: int = 0) -> Callable[[int, int], None]:
    """Return a function of (done, total) that moves a tqdm bar to `before + done`."""

    def progress(done: int, total: int) -> None:
        bar.update(before + done - bar.n)

    return progress
