# SPDX-License-Identifier: Apache-2.0
"""Numbers that options take; argparse says which they are if another is given."""

from __future__ import annotations

from argparse import ArgumentTypeError
from dataclasses import dataclass


@dataclass(frozen=True)
class Whole:
    """The type of a whole number from `least` to `most`."""

    least: int = 1
    most: int = 10**9

    def __call__(self, text: str) -> int:
        """Read one."""
        try:
            value = int(text)
        except ValueError:
            raise ArgumentTypeError(f"'{text}' is not a whole number") from None
        if not self.least <= value <= self.most:
            raise ArgumentTypeError(f"{value} is not from {self.least:,} to {self.most:,}")
        return value


@dataclass(frozen=True)
class Real:
    """The type of a number that is more than `above`, and at most `most`."""

    above: float = 0.0
    most: float = 1e9

    def __call__(self, text: str) -> float:
        """Read one; it is never nan."""
        try:
            value = float(text)
        except ValueError:
            raise ArgumentTypeError(f"'{text}' is not a number") from None
        if not self.above < value <= self.most:
            raise ArgumentTypeError(f"{text} is not above {self.above:g} and at most {self.most:g}")
        return value


#: Of things that are made or done one by one.
COUNT = Whole(most=10**6)
#: Tokens of a text; no model reads more.
LENGTH = Whole(most=1 << 24)
SEED = Whole(0, 2**31 - 1)
#: Of which nothing is left only if the option is left out.
SHARE = Real(most=1.0)


def is_number(kind: object) -> bool:
    """Whether an option's type reads numbers: what no file is named by."""
    return kind in (int, float) or isinstance(kind, Whole | Real)
