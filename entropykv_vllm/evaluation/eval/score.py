# SPDX-License-Identifier: Apache-2.0
"""What the answers of a cell are worth together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from entropykv_vllm.evaluation import scoring
from entropykv_vllm.evaluation.tasks import Case, Task
from entropykv_vllm.evaluation.tasks.grades import numbers


def summary(task: Task, cases: Sequence[Case], answers: Sequence[str]) -> dict[str, Any]:
    """Return `[mean, low, high]` of the accuracy, and of digits and form where numbers are asked.

    With them, the answers one by one.
    """
    grades = [task.grade(text, case) for text, case in zip(answers, cases, strict=True)]
    found: dict[str, Any] = {"accuracy": estimate(grades)}
    if task.kind == "number":
        pairs = list(zip(answers, cases, strict=True))
        found["digits"] = estimate([digits(text, case) for text, case in pairs])
        found["form"] = estimate([form(text, case) for text, case in pairs])
    found["answers"] = [
        {"wanted": case.answers, "depth": round(case.depth, 4), "answer": text, "grade": grade}
        for case, text, grade in zip(cases, answers, grades, strict=True)
    ]
    return found


def estimate(values: list[float]) -> list[float]:
    """Return a mean and its 95 % interval: Wilson's if all is right or wrong, else bootstrapped."""
    mean = sum(values) / len(values)
    if set(values) <= {0.0, 1.0}:
        return [mean, *scoring.wilson(round(sum(values)), len(values))]
    return [mean, *scoring.bootstrap(values)]


def digits(answer: str, case: Case) -> float:
    """The share of digits that stand in their place, number by number."""
    pairs = _pairs(answer, case)
    return sum(scoring.digits(given, wanted) for given, wanted in pairs) / len(pairs)


def form(answer: str, case: Case) -> float:
    """The share of the numbers asked for in whose place is one about as long."""
    pairs = _pairs(answer, case)
    return sum(scoring.form(given, wanted) for given, wanted in pairs) / len(pairs)


def _pairs(answer: str, case: Case) -> list[tuple[str, str]]:
    given = numbers(answer) + [""] * len(case.answers)
    return list(zip(given, case.answers, strict=False))
