# SPDX-License-Identifier: Apache-2.0
"""What README.md and docs/ say was measured is in docs/data."""

from __future__ import annotations

import json
from typing import Any

import pytest

from entropykv_vllm.config.settings import preset_names
from entropykv_vllm.evaluation.bench import command
from tests.docs.markdown import ROOT, block

DATA = ROOT / "docs/data"
#: Where the needles of docs/lara.md lie, in the order of its rows.
TIERS = (
    ("needle-2048", 0.5),
    ("needle-2048-lara0.3", 0.5),
    ("needle-2048-tiers", 0.5),
    ("needle-2048", 0.25),
    ("needle-2048-lara0.3", 0.25),
    ("needle-2048-lara-0.3", 0.25),
    ("needle-2048-lara-window0.5", 0.25),
    ("needle-2048-tiers", 0.25),
)


def stored(name: str) -> Any:
    return json.loads((DATA / name).read_text())


def costs(page: str, table: str, columns: dict[str, int]) -> dict[str, dict[str, str]]:
    """The first word of the named columns, by preset."""
    return {
        row[0].strip("`"): {name: row[column].split()[0] for name, column in columns.items()}
        for row in block(page, table)
    }


PAGES = {
    "README.md": costs("README.md", "presets", {"KL": 5, "needles": 6, "tokens/s": 7}),
    "docs/settings.md": costs(
        "docs/settings.md", "costs", {"KL": 1, "needles": 2, "tokens/s": 3, "reading": 4}
    ),
}


def decoding(name: str) -> dict[str, float]:
    """The tokens per second of 16 requests, and the seconds of reading their prompts."""
    rows = [row for row in stored("decode/table.json") if row["spec"]["batch"] == 16]
    (row,) = [row for row in rows if row["spec"]["name"] == name]
    return {"tokens/s": row["tokens/s"], "reading": row["reading seconds"]}


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("preset", preset_names())
def test_what_a_preset_costs(page, preset):
    row = PAGES[page][preset]
    ours, theirs = decoding(preset), decoding("stock vLLM")
    for name in ("tokens/s", "reading"):
        if name in row:
            assert row[name] == f"{ours[name] / theirs[name]:.2f}"
    if preset == "streaming":
        return
    (cell,) = [c for c in stored("quality/table.json") if c["spec"]["name"] == preset]
    decimals = len(row["KL"].partition(".")[2])
    assert decimals >= 3
    assert row["KL"] == f"{cell['kl'][0]:.{decimals}f}"
    needles = stored(f"needle-2048-presets/{preset}.json")
    assert row["needles"] == f"{needles['exact'][0] * needles['spec']['prompts']:.0f}"


@pytest.mark.parametrize("row", block("docs/scores.md", "needles"), ids=lambda row: row[0])
def test_which_score_finds_more(row):
    policy, keep = row[0].split()[:2]
    cell = stored(f"needle-2048/{policy.strip('`')}-{keep}.json")
    assert row[1:3] == [f"{100 * cell['held']:.0f} %", f"{100 * cell['exact'][0]:.0f} %"]


@pytest.mark.parametrize(
    ("row", "where"), list(zip(block("docs/lara.md", "needles"), TIERS, strict=True))
)
def test_which_layers_find_more(row, where):
    folder, keep = where
    cell = stored(f"{folder}/entropykv-{keep}.json")
    share, low, high = (f"{100 * value:.0f}" for value in cell["exact"])
    assert row[1:] == [f"{keep}", f"{100 * cell['held']:.0f} %", f"{share} ({low}-{high})"]


@pytest.mark.parametrize("name", ["bench", "bench-streaming"])
def test_the_same_memory_without_eviction_and_with_it(name):
    found = {
        cell["spec"]["eviction"].get("preset", command.STOCK): cell
        for cell in (stored(f"{name}/{path.name}") for path in (DATA / name).glob("*-0.json"))
    }
    table = block("docs/benchmarks.md", name)
    assert table == command.rows([{**found.pop(row[0]), "name": row[0]} for row in table])
    assert not found


def test_every_preset_was_served_in_the_same_memory():
    rows = block("docs/benchmarks.md", "bench") + block("docs/benchmarks.md", "bench-streaming")
    assert {row[0] for row in rows} == {command.STOCK, *preset_names()}
