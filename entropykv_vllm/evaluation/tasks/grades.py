# SPDX-License-Identifier: Apache-2.0
"""What answers are worth, from 0 to 1."""

from __future__ import annotations

import re

from entropykv_vllm.evaluation.scoring import NUMBER, exact
from entropykv_vllm.evaluation.tasks.case import Case

WORD = re.compile(r"[^\W\d_]+")


def words(text: str) -> list[str]:
    """Return the words of a text in lower case."""
    return WORD.findall(text.lower())


def numbers(text: str) -> list[str]:
    """Return the numbers of a text, thousands separators dropped."""
    return [number.replace(",", "") for number in NUMBER.findall(text)]


def first_number(answer: str, case: Case) -> float:
    """1 if the first number of the answer is the one asked for."""
    return float(exact(answer, case.answers[0]))


def first_word(answer: str, case: Case) -> float:
    """1 if the first word of the answer is the one asked for."""
    return float(words(answer)[:1] == [case.answers[0]])


def share_of_numbers(answer: str, case: Case) -> float:
    """The share of the numbers asked for that are in the answer, in any order."""
    given = numbers(answer)[: len(case.answers)]
    return sum(number in given for number in case.answers) / len(case.answers)


def words_in_order(answer: str, case: Case) -> float:
    """The share of the words asked for that the answer has in the same order."""
    wanted = words(case.answers[0])
    return common(wanted, words(answer)[: len(wanted)]) / len(wanted)


def common(a: list[str], b: list[str]) -> int:
    """The length of the longest common subsequence."""
    row = [0] * (len(b) + 1)
    for x in a:
        before = row
        row = [0]
        for j, y in enumerate(b):
            row.append(before[j] + 1 if x == y else max(row[j], before[j + 1]))
    return row[-1]
