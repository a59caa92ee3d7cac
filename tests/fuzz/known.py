# SPDX-License-Identifier: Apache-2.0
"""What vLLM itself answers with HTTP 500 or 501, without the plugin too.

`python -m tests.fuzz --stock` sends the examples to a server without it, and fails if one of them
is answered otherwise.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Known:
    """A kind of such answers: the route and the sentence, and a request that gets one."""

    path: str
    sentence: str
    example: tuple[str, str, bytes]


KNOWN = [
    Known(
        "/invocations",
        "maximum recursion depth exceeded",
        ("POST", "/invocations", b'{"prompt":' + b"[" * 20_000 + b"]" * 20_000 + b"}"),
    ),
    Known(
        "/v1/systemone",
        "does not support the structured decision API",
        ("POST", "/v1/systemone", b'{"state": "x", "questions": {"a": {"type": "x"}}}'),
    ),
]

#: Of a log's complaints, those that are faults wherever they come from.
BAD = ("AuditError", "EngineDeadError")


def explains(complaint: str) -> bool:
    """Is a complaint of the log of vLLM's own: a traceback that our code did not call up?

    vLLM logs some for what it refuses. Whether the answer was right is looked at beside this.
    """
    place = complaint.rpartition(", at ")[2]
    return bool(place) and "/entropykv_vllm/" not in place and not any(x in complaint for x in BAD)


def is_known(path: str, sentence: str) -> bool:
    """Is this one of vLLM's own?"""
    return any(re.fullmatch(k.path, path) and re.search(k.sentence, sentence) for k in KNOWN)
