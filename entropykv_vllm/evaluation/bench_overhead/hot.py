# SPDX-License-Identifier: Apache-2.0
"""Which of our functions take most of a step."""

from __future__ import annotations

import cProfile
import pstats
from collections import defaultdict
from pathlib import Path
from typing import Any

import entropykv_vllm

PACKAGE = Path(entropykv_vllm.__file__).parent
#: What cProfile takes for the file of a function in C, and of a dataclass's methods.
IN_C, MADE = "~", "<string>"

_Function = tuple[str, int, str]


def hottest(profile: cProfile.Profile, steps: int, count: int = 10) -> list[dict[str, Any]]:
    """Our functions by the time they take themselves, with what they call in C.

    The profiler makes functions in Python slower than they are: it tells which they are, and the
    clock of `parts` what they cost.

    Args:
        profile: of some steps.
        steps: how many.
        count: of functions.
    """
    seconds: dict[_Function, float] = defaultdict(float)
    calls: dict[_Function, int] = {}
    for function, (_, number, own, _, callers) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
        if _ours(function):
            seconds[function] += own
            calls[function] = number
        elif function[0] in (IN_C, MADE):
            for caller, (_, _, alone, whole) in callers.items():
                if _ours(caller):
                    seconds[caller] += alone if function[0] == IN_C else whole
    ranked = sorted(seconds, key=lambda function: -seconds[function])
    return [
        {
            "function": _name(function),
            "µs a step": 1e6 * seconds[function] / steps,
            "calls a step": calls[function] / steps,
        }
        for function in ranked[:count]
    ]


def _ours(function: _Function) -> bool:
    path = Path(function[0])
    return path.is_relative_to(PACKAGE) and not path.is_relative_to(PACKAGE / "evaluation")


def _name(function: _Function) -> str:
    path = Path(function[0]).relative_to(PACKAGE).with_suffix("")
    return f"{'.'.join(path.parts)}: {function[2]}"
