# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/quality.md."""

import pytest

from entropykv_vllm.errors import UsageError
from entropykv_vllm.evaluation import pareto
from entropykv_vllm.evaluation.report import chapters, command, forms, page, plots, tables
from entropykv_vllm.evaluation.report.sections import POLICIES, Section, cell, grid, kept

WANTED = "1234567"


def results(*rows):
    return [
        {
            "wanted": [WANTED],
            "answers": list(row),
            "grades": [float(WANTED in a) for a in row],
            "held": [0.5] * len(row),
        }
        for row in rows
    ]


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (" 1234567.\n", "right"),
        (" 1,234,567", "right"),
        (" 1234999", "near"),
        (" 9876543", "number"),
        (" 1613.", "short number"),
        (" not known", "prose"),
        (" the 7 of", "prose"),
        ("", "prose"),
    ],
)
def test_kinds_of_answers(answer, kind):
    assert forms.kind(answer, WANTED) == kind


def test_a_front_is_what_nothing_beats_with_as_few_bytes():
    points = [(10, 5), (20, 50), (30, 40), (40, 90), (40, 80), (50, 90)]
    assert pareto.front(points) == [(10, 5), (20, 50), (40, 90)]


def test_the_grid_has_each_cell_once():
    cells = grid(POLICIES, (0.5, 0.25), (16, 8, 4), 2048)
    names = [c.name for c in cells]
    assert len(set(names)) == len(names) == 3 + 8 * 2 * 3 + 2 * 2
    assert names[:3] == ["full cache", "all 1 8", "all 1 4"]


def test_windows_hold_as_much_as_the_others():
    assert cell("sink", 0.5, 16, 2048).eviction["window"] == 256 + 896


def test_the_matrix_has_a_row_a_policy_and_windows_in_all_of_them():
    cells = grid(("norm", "sink"), (0.5,), (16, 4), 2048)
    names = [c.name for c in cells]
    assert names == ["full cache", "all 1 4", "norm 0.5 16", "norm 0.5 4", "sink 0.5 16"]
    found = results([WANTED, WANTED, WANTED, "1", "2"], [WANTED, WANTED, "3", "4", WANTED])
    text = tables.matrix(cells, found, None, 4)
    assert "norm" in text
    assert "0 (0-66)" in text
    assert "50 (9-91)" in text.splitlines()[-1]


def test_budgets_take_the_best_that_fits():
    cells = [*kept(2048), cell("norm", 0.5, 16, 2048)]
    found = results([WANTED, WANTED, "1", WANTED])
    found[0]["held"] = [1.0, 0.55, 0.33, 0.45]
    lines = tables.front(cells, found).splitlines()
    column = lines[0].split("|").index(" norm ")
    by_budget = {line.split("|")[1].strip(): line.split("|")[column].strip() for line in lines[2:]}
    assert by_budget["30 %"] == ""
    assert by_budget["35 %"] == "0"
    assert by_budget["50 %"] == "100"


def test_a_page_keeps_its_prose_and_changes_its_tables(tmp_path):
    path = tmp_path / "page.md"
    path.write_text(
        "a\n<!-- table x -->\nold\n<!-- end -->\nb\n<!-- table y -->\nz\n<!-- end -->\n"
    )
    assert page.fill(path, {"x": "| new \\1 |", "q": "?"}) == ["q"]
    assert path.read_text() == (
        "a\n<!-- table x -->\n| new \\1 |\n<!-- end -->\nb\n<!-- table y -->\nz\n<!-- end -->\n"
    )


def test_pictures_are_drawn(tmp_path):
    cells = grid(("entropykv",), (0.75, 0.5, 0.25, 0.1), (16, 8, 4), 2048)
    found = results([WANTED] * len(cells), ["99"] * len(cells))
    section = Section("x", cells)
    plots.front(cells, found, tmp_path / "front.png", "title")
    plots.forms(section, found, tmp_path / "forms.png")
    made = forms.tables([(section, found)], tmp_path)
    assert "digits right in wrong answers" in made["forms entropykv"]
    assert (tmp_path / "front.png").stat().st_size > 1000


def test_what_depends_on_the_matrix_says_so(tmp_path):
    with pytest.raises(UsageError, match="'matrix' first"):
        chapters.CHAPTERS["long"].sections(tmp_path)


def test_chapters_that_are_left_out_are_named_with_the_reason(tmp_path, capsys):
    (tmp_path / "agnostic-2k.jsonl").write_text('{"other": 1}\n1\n')
    assert command.main(["--stored", "--chapters", "matrix", "--data", str(tmp_path)]) == 0
    said = capsys.readouterr().err
    assert f"matrix is left out: {tmp_path}/agnostic-2k.jsonl is of another specification" in said
    assert f"there is no {tmp_path}/text-2k.jsonl" in said
