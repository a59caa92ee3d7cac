# SPDX-License-Identifier: Apache-2.0
"""What one look at the machine found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Check:
    """A check's result.

    Attributes:
        name: of the check.
        state: "warn" if a server runs, but not as well as it could; "fail" if none does.
        found: what there is.
        advice: what to do, in one sentence; nothing where all is well.
    """

    name: str
    state: State
    found: str
    advice: str = ""


def ok(name: str, found: str) -> Check:
    """A check that found nothing to do."""
    return Check(name, "ok", found)
