# SPDX-License-Identifier: Apache-2.0
"""The chapters of docs/quality.md: what each measures, and the tables and pictures it makes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from entropykv_vllm.config.settings import load
from entropykv_vllm.errors import UsageError
from entropykv_vllm.evaluation.calibration import allocation
from entropykv_vllm.evaluation.offline import runs
from entropykv_vllm.evaluation.report import against, forms, plots, tables
from entropykv_vllm.evaluation.report.sections import (
    BITS,
    FEWER,
    FULL,
    KEEPS,
    POLICIES,
    Section,
    cell,
    grid,
    least,
    little,
    shapes,
)
from entropykv_vllm.model.fetch import NAME

Found = Sequence[tuple[Section, list[Any]]]
GEMMA = "gemma3-270m"
#: Tasks that the small model can do beside needles.
OTHERS = ("multikey", "word", "copy")
#: Where 8 bits would say what 16 do.
FEW_BITS = (16, 4)


@dataclass(frozen=True)
class Chapter:
    """Sections to be measured (some depend on stored ones), and the tables made of them."""

    sections: Callable[[Path], list[Section]]
    tables: Callable[[Found, Path], dict[str, str]]


def _matrix(_: Path) -> list[Section]:
    cells = grid(POLICIES, KEEPS, BITS, 2048)
    return [
        Section("agnostic-2k", cells),
        Section("text-2k", cells, task="text", prompts=8),
    ]


def _matrix_tables(found: Found, folder: Path) -> dict[str, str]:
    (section, needles), (_, texts) = found
    plots.front(section.cells, needles, folder / "agnostic-2k.png", "Needle in 2,048 tokens")
    made = {f"agnostic {bits}": tables.matrix(section.cells, needles, texts, bits) for bits in BITS}
    return {**made, "kept": tables.whole(section.cells, needles, texts), **_fronts(found)}


def _fronts(found: Found) -> dict[str, str]:
    section, needles = found[0]
    return {f"front {section.name}": tables.front(section.cells, needles)}


def _aware(_: Path) -> list[Section]:
    return [Section("aware-2k", grid(POLICIES, FEWER, (16, 4), 2048), aware=True)]


def _one(found: Found, folder: Path) -> dict[str, str]:
    section, results = found[0]
    plots.front(section.cells, results, folder / f"{section.name}.png", section.name)
    bits = {cell.eviction.get("bits", 16) for cell in section.cells if cell.policy != "none"}
    made = {
        f"{section.name} {b}": tables.matrix(section.cells, results, None, b) for b in sorted(bits)
    }
    return {**made, **_fronts(found)}


def best(folder: Path, count: int = 5) -> list[str]:
    """The policies that answer most in the matrix, as far as it is stored; entropykv first."""
    section = _matrix(folder)[0]
    results = runs.stored(folder / f"{section.name}.jsonl", section.spec())
    if not results:
        raise UsageError("measure the chapter 'matrix' first: the best of it go on")
    scores = dict.fromkeys(POLICIES, 0.0)
    for i, one in enumerate(section.cells):
        if one.policy in scores and one.eviction.get("bits", 16) == 16:
            scores[one.policy] += tables.exact(results, i)[0]
    return sorted(POLICIES, key=lambda policy: -scores[policy])[:count]


def _long(folder: Path) -> list[Section]:
    cells = grid(best(folder), KEEPS, FEW_BITS, 4096)
    return [Section("agnostic-4k", cells, tokens=4096)]


def _gemma(folder: Path) -> list[Section]:
    cells = grid(best(folder), KEEPS, FEW_BITS, 2048)
    return [Section("gemma-2k", cells, model=GEMMA)]


def order() -> list[int]:
    """The embedded model's layers, the most sensitive first, of its shipped profile."""
    profile = load("entropykv", f"{NAME}.json").profile
    assert profile is not None
    return allocation.ranked(profile.sensitivity)


def _layers(_: Path) -> list[Section]:
    return [Section("layers-2k", shapes(2048, order()))]


def _layers_tables(found: Found, folder: Path) -> dict[str, str]:
    section, results = found[0]
    return {"layers": tables.answers(section.cells, results)}


def _little(_: Path) -> list[Section]:
    return [
        Section("tiers-4k", little(4096, order()), tokens=4096, prompts=24),
        Section("least-4k", least(4096, order()), tokens=4096, prompts=24),
    ]


def _little_tables(found: Found, folder: Path) -> dict[str, str]:
    return {section.name: tables.smaller(section.cells, results) for section, results in found}


def _generation(_: Path) -> list[Section]:
    cells = grid(POLICIES, (0.25,), (16,), 1660)
    return [
        Section(f"generated-{side}", cells, side, tokens=1660, prompts=24)
        for side in ("early", "recent")
    ]


def _generation_tables(found: Found, folder: Path) -> dict[str, str]:
    (section, early), (_, recent) = found
    return {"generation": tables.both(section.cells, early, recent)}


def _tasks(folder: Path) -> list[Section]:
    cells = grid(best(folder), (0.5, 0.25), (4,), 2048)
    return [Section(f"task-{name}", cells, name, prompts=24) for name in OTHERS]


def _tasks_tables(found: Found, folder: Path) -> dict[str, str]:
    by_task = {section.task: results for section, results in found}
    return {"tasks": tables.grades(found[0][0].cells, by_task)}


def _engine(_: Path) -> list[Section]:
    cells = [FULL, *(cell(p, k, 16, 2048) for p in POLICIES for k in (0.5, 0.25))]
    return [Section("engine-2k", cells, prompts=48, dtype="float32", through_engine=True)]


def _engine_tables(found: Found, folder: Path) -> dict[str, str]:
    section, results = found[0]
    return {"engine": against.table_of(section, results, folder.parent / "needle-2048")}


def _forms(folder: Path) -> list[Section]:
    return _matrix(folder)[:1]


CHAPTERS = {
    "matrix": Chapter(_matrix, _matrix_tables),
    "aware": Chapter(_aware, _one),
    "long": Chapter(_long, _one),
    "gemma": Chapter(_gemma, _one),
    "layers": Chapter(_layers, _layers_tables),
    "little": Chapter(_little, _little_tables),
    "generation": Chapter(_generation, _generation_tables),
    "tasks": Chapter(_tasks, _tasks_tables),
    "engine": Chapter(_engine, _engine_tables),
    "forms": Chapter(_forms, forms.tables),
}
