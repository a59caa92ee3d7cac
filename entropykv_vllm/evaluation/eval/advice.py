# SPDX-License-Identifier: Apache-2.0
"""What to know of a table before anything is concluded from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from entropykv_vllm.evaluation.eval.rows import label

Results = Sequence[Mapping[str, Any]]


def warnings(results: Results) -> list[str]:
    """Say which settings save nothing, by length, in a sentence each."""
    measured = [r for r in results if r.get("held") is not None]
    lengths = dict.fromkeys(r["spec"]["tokens"] for r in measured)
    found = {n: _saving_nothing([r for r in measured if r["spec"]["tokens"] == n]) for n in lengths}
    return [
        f"at {tokens:,} tokens {'; '.join(names)} hold as much as the full cache or more: of so "
        "short a text little is older than the window, and pages are whole; take longer --tokens"
        for tokens, names in found.items()
        if names
    ]


def _saving_nothing(results: Results) -> list[str]:
    """The names of the settings that hold what the full cache holds, or more."""
    full = [r["held"] for r in results if r["spec"]["policy"] == "none"]
    if not full:
        return []
    others = [r for r in results if r["spec"]["policy"] != "none" and r["held"] >= min(full)]
    return list(dict.fromkeys(_named(r["spec"]) for r in others))


def _named(spec: Mapping[str, Any]) -> str:
    """A setting as its row of the table has it."""
    keep = "" if spec["keep"] is None else f", keep {spec['keep']:g}"
    bits = "" if spec["bits"] is None else f", {spec['bits']} bits"
    return f"{label(spec)}{keep}{bits}"
