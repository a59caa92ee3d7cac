# SPDX-License-Identifier: Apache-2.0
"""What a server's log complains of."""

from __future__ import annotations

import re
from collections import Counter

from .known import BAD

#: What a logger puts before each line.
_BEFORE = re.compile(r"^\(\w+ pid=\d+\) (\w+ [\d-]+ [\d:]+ \[[\w.]+:\d+\] ?)?")
#: What Python puts before each line of an exception group, as of a stream that breaks off.
_GROUP = re.compile(r"^ *[|+] ")
#: Whose call it was: libraries are called by one of these.
_CALLERS = ("/vllm/", "/entropykv_vllm/")


def complaints(text: str) -> Counter[str]:
    """How often each was logged: a traceback by its last line, and its last place in vLLM or here.

    If it has none, by its last place.
    """
    found: Counter[str] = Counter()
    place: str | None = None
    for line in (_GROUP.sub("", _BEFORE.sub("", line)) for line in text.splitlines()):
        if line.lstrip().startswith(("Traceback (most", "Exception Group Traceback (most")):
            place = ""
        elif place is not None and line.startswith("  "):
            place = _nearer(place, line.strip()) if line.startswith('  File "') else place
        elif place is not None:
            found[f"{line[:200]}, at {place}"] += 1
            place = None
        elif any(word in line for word in BAD):
            found[line[:200]] += 1
    return found


def _nearer(place: str, next_one: str) -> str:
    """Of two places of a traceback, the one that says whose fault it is."""
    own = any(caller in next_one for caller in _CALLERS)
    return next_one if own or not any(caller in place for caller in _CALLERS) else place
