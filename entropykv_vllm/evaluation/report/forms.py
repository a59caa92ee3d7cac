# SPDX-License-Identifier: Apache-2.0
"""Of wrong answers, how many keep the form: a number, its length, some of its digits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from entropykv_vllm.evaluation import scoring, table
from entropykv_vllm.evaluation.report import plots
from entropykv_vllm.evaluation.report.sections import KEEPS, Section

EXAMPLES = 3


def kind(answer: str, wanted: str) -> str:
    """What an answer is: "right", "near" (its length, half of its digits), "number" or "prose".

    "number" is any other number as the first thing said; "prose" begins with a word.
    """
    first = scoring.found(answer)
    if first == wanted:
        return "right"
    if not first or any(letter.isalpha() for letter in answer.split(first[0])[0]):
        return "prose"
    if len(first) == len(wanted) and scoring.digits(answer, wanted) >= 0.5:
        return "near"
    return "number" if len(first) > 4 else "short number"


KINDS = ("right", "near", "number", "short number", "prose")


def rows(section: Section, results: Sequence[dict[str, Any]], policy: str) -> list[list[str]]:
    """A row for each keep ratio and number of bits of a policy."""
    found = []
    for keep in (1.0, *KEEPS):
        for bits in (16, 8, 4):
            name = f"{policy} {keep:g} {bits}" if keep < 1 else f"all 1 {bits}"
            name = "full cache" if name == "all 1 16" else name
            for i, cell in enumerate(section.cells):
                if cell.name == name:
                    found.append([f"{keep:g}", str(bits), *_shares(results, i)])
    return found


def _shares(results: Sequence[dict[str, Any]], i: int) -> list[str]:
    kinds = [kind(r["answers"][i], r["wanted"][0]) for r in results]
    wrong = [r for r, k in zip(results, kinds, strict=True) if k != "right"]
    right = [scoring.digits(r["answers"][i], r["wanted"][0]) for r in wrong]
    digits = table.percent(sum(right) / len(right)) if right else ""
    return [*(str(kinds.count(k)) for k in KINDS), digits]


def examples(section: Section, results: Sequence[dict[str, Any]], policy: str) -> str:
    """Wrong answers, as they came, of cells that keep less and less."""
    header = ["cell", "wanted", "answer"]
    found = []
    for i, cell in enumerate(section.cells):
        if cell.policy == policy and cell.eviction.get("keep", 1) < 1:
            wrong = [r for r in results if r["grades"][i] < 1][:EXAMPLES]
            found += [[cell.name, r["wanted"][0], _quoted(r["answers"][i])] for r in wrong]
    return table.render(header, found)


def _quoted(answer: str) -> str:
    return f"`{' '.join(answer.split())}`".replace("|", "/")


def tables(found: Sequence[tuple[Section, list[Any]]], folder: Path) -> dict[str, str]:
    """The tables of docs/semantic-quantization.md, and its picture."""
    section, results = found[0]
    header = ["keep", "bits", *KINDS, "digits right in wrong answers %"]
    plots.forms(section, results, folder / "forms.png")
    return {
        **{f"forms {p}": table.render(header, rows(section, results, p)) for p in SHOWN},
        **{f"examples {p}": examples(section, results, p) for p in SHOWN[:1]},
    }


SHOWN = ("entropykv", "norm")
