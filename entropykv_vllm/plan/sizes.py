# SPDX-License-Identifier: Apache-2.0
"""Lengths and amounts of memory, as people write them and as they are printed."""

from __future__ import annotations

import re

#: Cards are sold in units of 1,000; `GiB` is for who reads the driver.
_BYTES = {"g": 10**9, "gb": 10**9, "gib": 1 << 30, "mb": 10**6, "mib": 1 << 20}
_TOKENS = {"": 1, "k": 1 << 10, "m": 1 << 20}

#: No model reads as many tokens, and looking at each boundary on the way would take long.
MOST_TOKENS = 1 << 24

#: No machine has as much memory, nor reads as much of it in a second.
MOST_BYTES = 10**16


def parse_tokens(text: str) -> int:
    """A length such as `8192`, `32k` or `1M`; k is 1,024.

    Raises:
        ValueError: if it is not one, in words.
    """
    tokens = _parse(text, _TOKENS, "a number of tokens such as 8192 or 32k")
    if tokens > MOST_TOKENS:
        raise ValueError(f"'{text}' is too long: lengths are planned up to {MOST_TOKENS:,} tokens")
    return tokens


def parse_bytes(text: str, bare: int | None = 10**9) -> int:
    """An amount of memory such as `8GB`, `24GiB`, `700MB` or `8`.

    Args:
        bare: bytes of the unit of a number without one, GB if not said; None to refuse it.

    Raises:
        ValueError: if it is not one, in words.
    """
    units = _BYTES if bare is None else {**_BYTES, "": bare}
    value = _parse(text, units, "an amount of memory such as 8GB or 7.6GiB")
    if value > MOST_BYTES:
        raise ValueError(f"'{text}' is too much: amounts are read up to {MOST_BYTES // 10**9:,} GB")
    return value


def _parse(text: str, units: dict[str, int], wanted: str) -> int:
    found = re.fullmatch(r"\s*(\d+(?:[,_]\d{3})*(?:\.\d+)?)\s*([a-z]*)\s*", text.lower())
    if not found or found[2] not in units:
        raise ValueError(f"'{text}' is not {wanted}")
    value = int(float(re.sub(r"[,_]", "", found[1])) * units[found[2]])
    if value < 1:
        raise ValueError(f"'{text}' is not {wanted}: it must be more than nothing")
    return value


def show_bytes(value: float) -> str:
    """In the unit that suits, with three digits: 5.57 GB, 37.8 MB."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if abs(value) >= size:
            return f"{_digits(value / size)} {unit}"
    return f"{value:.0f} B"


def show_count(value: int) -> str:
    """In billions or millions, with three digits: 7.62 billion."""
    billions = value / 1e9
    return f"{_digits(billions)} billion" if billions >= 0.9 else f"{_digits(value / 1e6)} million"


def _digits(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
