# SPDX-License-Identifier: Apache-2.0
"""A value that is handed on from variable to variable."""

from __future__ import annotations

import random

from entropykv_vllm.evaluation.tasks.case import Task
from entropykv_vllm.evaluation.tasks.grades import first_number
from entropykv_vllm.evaluation.tasks.prose import Draft, in_prose

HOPS = 2


def draft(rng: random.Random, depth: float) -> Draft:
    """Hide the value at `depth`, and the assignments evenly between there and the end."""
    number = str(rng.randrange(10_000, 100_000))
    names = [f"X{i + 1}" for i in range(HOPS + 1)]
    step = (1 - depth) / len(names)
    values = [number, *names]
    facts = [
        (depth + i * step, f" {name} = {value}.")
        for i, (name, value) in enumerate(zip(names, values, strict=False))
    ]
    return Draft(
        facts=facts,
        question=f"\n\nWhat is the value of {names[-1]}?",
        primer=f" {names[-1]} = {names[-2]} =",
        answers=(number,),
    )


TASK = Task("tracking", "number", 12, in_prose(draft), first_number)
