# SPDX-License-Identifier: Apache-2.0
"""The offline results beside those of the engine, prompt by prompt."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from entropykv_vllm.evaluation import scoring, table
from entropykv_vllm.evaluation.report.sections import Section

HEADER = ["cell", "engine, exact %", "offline, exact %", "same verdict", "same answer"]


def table_of(section: Section, results: Sequence[dict[str, Any]], folder: Path) -> str:
    """A row a cell that `entropykv needle` has a result of, in `folder`."""
    rows = []
    for i, cell in enumerate(section.cells):
        name = "none-1" if cell.policy == "none" else f"{cell.policy}-{cell.eviction['keep']:g}"
        file = folder / f"{name}.json"
        if file.is_file():
            engine = json.loads(file.read_text())["answers"][: len(results)]
            rows.append([cell.name, *_compared(engine, results, i)])
    return table.render(HEADER, rows)


def _compared(engine: list[dict[str, Any]], results: Sequence[dict[str, Any]], i: int) -> list[str]:
    pairs = [(e["answer"], r["answers"][i]) for e, r in zip(engine, results, strict=True)]
    numbers = [e["number"] for e in engine]
    theirs = [scoring.exact(e, n) for (e, _), n in zip(pairs, numbers, strict=True)]
    ours = [scoring.exact(o, n) for (_, o), n in zip(pairs, numbers, strict=True)]
    count = len(pairs)
    return [
        table.interval([sum(theirs) / count, *scoring.wilson(sum(theirs), count)]),
        table.interval([sum(ours) / count, *scoring.wilson(sum(ours), count)]),
        f"{sum(a == b for a, b in zip(theirs, ours, strict=True))}/{count}",
        f"{sum(a.strip() == b.strip() for a, b in pairs)}/{count}",
    ]
