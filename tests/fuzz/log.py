# SPDX-License-Identifier: Apache-2.0
"""What a server's log complains of."""

from __future__ import annotations

import re
from collections import Counter

from .known import BAD

#: What a logger puts before each line.
_BEFORE = re.compile(r"^\(\w+ pid=\d+\) (\w+ [\d-]+ [\d:]+ \[[\w.]+:\d+\] ?)?")


def complaints(text: str) -> Counter[str]:
    """How often each was logged: a traceback by its last line and its last place."""
    found: Counter[str] = Counter()
    place: str | None = None
    for line in (_BEFORE.sub("", line) for line in text.splitlines()):
        if line.lstrip().startswith("Traceback (most"):
            place = ""
        elif place is not None and line.startswith("  "):
            place = line.strip() if line.startswith('  File "') else place
        elif place is not None:
            found[f"{line[:200]}, at {place}"] += 1
            place = None
        elif any(word in line for word in BAD):
            found[line[:200]] += 1
    return found
