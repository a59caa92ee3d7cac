# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/quality.md, out of stored results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from entropykv_vllm.evaluation import divergence, scoring, table
from entropykv_vllm.evaluation.offline.cell import Cell

Row = list[str]


def held(results: Sequence[dict[str, Any]], i: int) -> float:
    """The bytes that cell `i` held, as a share of a full 16-bit cache's; a mean over prompts."""
    return sum(r["held"][i] for r in results) / len(results)


def exact(results: Sequence[dict[str, Any]], i: int) -> list[float]:
    """The share of prompts that cell `i` answered right, with its 95 % interval."""
    hits = sum(r["grades"][i] == 1 for r in results)
    return [hits / len(results), *scoring.wilson(hits, len(results))]


def digits(results: Sequence[dict[str, Any]], i: int) -> float:
    """The share of digits in their places."""
    return sum(scoring.digits(r["answers"][i], r["wanted"][0]) for r in results) / len(results)


def form(results: Sequence[dict[str, Any]], i: int) -> float:
    """The share of answers whose first number is as long as the one asked for."""
    return sum(scoring.form(r["answers"][i], r["wanted"][0]) for r in results) / len(results)


def answers(cells: Sequence[Cell], results: Sequence[dict[str, Any]]) -> str:
    """A row a cell: bytes held, exact answers, digits, form."""

    def row(i: int) -> Row:
        return [
            f"{100 * held(results, i):.1f}",
            table.interval(exact(results, i)),
            table.percent(digits(results, i)),
            table.percent(form(results, i)),
        ]

    return _by_cell(cells, ["held %", "exact % (95 %)", "digits %", "form %"], row)


def _by_cell(
    cells: Sequence[Cell],
    header: Row,
    row: Callable[[int], Row],
    order: Iterable[int] | None = None,
) -> str:
    """A row a cell, of all or those in `order`: its name, then what `row` says of its number."""
    numbers = range(len(cells)) if order is None else order
    return table.render(["cell", *header], [[cells[i].name, *row(i)] for i in numbers])


def matrix(
    cells: Sequence[Cell],
    results: Sequence[dict[str, Any]],
    texts: Sequence[list[dict[str, Any]]] | None,
    bits: int,
) -> str:
    """A row a policy, a column a keep ratio: exact % at some bits and, if known, KL."""
    keeps = sorted({_keep(cell) for cell in cells if _keep(cell) < 1}, reverse=True)
    rows = []
    for policy in dict.fromkeys(cell.policy for cell in cells if cell.policy != "none"):
        row = [policy]
        for keep in keeps:
            row.append(_entry(cells, results, texts, f"{policy} {keep:g} {_bits(policy, bits)}"))
        if any(row[1:]):
            rows.append(row)
    return table.render([f"{bits} bits", *(f"keep {keep:g}" for keep in keeps)], rows)


def _entry(cells, results, texts, name: str) -> str:
    found = [i for i, cell in enumerate(cells) if cell.name == name]
    if not found:
        return ""
    right = table.interval(exact(results, found[0]))
    if not texts:
        return right
    return f"{right}, {kl(texts, found[0])[0]:.3f}"


def kl(texts: Sequence[list[dict[str, Any]]], i: int) -> list[float]:
    """The divergence of cell `i`, `[mean, low, high]` in nats."""
    return divergence.summary([text[i] for text in texts])["kl"]


def _bits(policy: str, bits: int) -> int:
    return 16 if policy in ("sink", "window") else bits


def _keep(cell: Cell) -> float:
    return float(cell.eviction.get("keep", 1.0))


def whole(
    cells: Sequence[Cell],
    results: Sequence[dict[str, Any]],
    texts: Sequence[list[dict[str, Any]]],
) -> str:
    """The full cache, and that of all tokens in fewer bits."""

    def row(i: int) -> Row:
        return [
            f"{100 * held(results, i):.0f}",
            table.interval(exact(results, i)),
            divergence.nats(kl(texts, i)),
        ]

    wanted = [i for i, cell in enumerate(cells) if _keep(cell) == 1]
    return _by_cell(cells, ["held %", "exact % (95 %)", "KL (95 %)"], row, wanted)


def points(
    cells: Sequence[Cell], results: Sequence[dict[str, Any]], policy: str
) -> list[tuple[float, float]]:
    """Bytes held and exact answers in percent of a policy's cells; everything kept is of all."""
    return [
        (100 * held(results, i), 100 * exact(results, i)[0])
        for i, cell in enumerate(cells)
        if cell.policy == policy or _keep(cell) == 1
    ]


def front(cells: Sequence[Cell], results: Sequence[dict[str, Any]]) -> str:
    """For each budget of bytes, the most exact answers that each policy gives within it."""
    policies = list(dict.fromkeys(cell.policy for cell in cells if cell.policy != "none"))
    rows = []
    for budget in BUDGETS:
        row = [f"{budget} %"]
        for policy in policies:
            within = [right for bytes_, right in points(cells, results, policy) if bytes_ <= budget]
            row.append(f"{max(within):.0f}" if within else "")
        rows.append(row)
    return table.render(["bytes at most", *policies], rows)


def smaller(cells: Sequence[Cell], results: Sequence[dict[str, Any]]) -> str:
    """A row a cell, what holds most first: how many times smaller, and exact answers."""

    def row(i: int) -> Row:
        return [
            f"{100 * held(results, i):.1f}",
            f"{1 / held(results, i):.1f}",
            table.interval(exact(results, i)),
            table.percent(digits(results, i)),
        ]

    order = sorted(range(len(cells)), key=lambda i: -held(results, i))
    return _by_cell(cells, ["held %", "times smaller", "exact % (95 %)", "digits %"], row, order)


def grades(cells: Sequence[Cell], by_task: Mapping[str, Sequence[dict[str, Any]]]) -> str:
    """A row a cell, a column a task: the mean grade in percent, and over all tasks."""
    rows = []
    for i, cell in enumerate(cells):
        means = [sum(r["grades"][i] for r in found) / len(found) for found in by_task.values()]
        rows.append([cell.name, *map(table.percent, means), table.percent(sum(means) / len(means))])
    return table.render(["cell", *by_task, "mean"], rows)


def both(
    cells: Sequence[Cell], early: Sequence[dict[str, Any]], recent: Sequence[dict[str, Any]]
) -> str:
    """A row a cell: what is known of the facts before, and of those after what was generated."""

    def row(i: int) -> Row:
        return [
            f"{100 * held(early, i):.0f}",
            table.interval(exact(early, i)),
            table.interval(exact(recent, i)),
        ]

    return _by_cell(cells, ["held %", "early fact % (95 %)", "recent fact % (95 %)"], row)


#: Of a full 16-bit cache, in percent.
BUDGETS = (20, 25, 30, 35, 40, 50, 60, 80)
