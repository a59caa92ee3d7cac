# SPDX-License-Identifier: Apache-2.0
"""The tests that docs/testing.md names are there, and those made for its list stand in it."""

from __future__ import annotations

import ast
import re

import pytest

from tests.docs.markdown import ROOT, block

ROWS = block("docs/testing.md", "known")
MADE_FOR_IT = "engine/test_known.py"


def functions_of(file: str) -> set[str]:
    """The names of the tests in a file below tests/."""
    tree = ast.parse((ROOT / "tests" / file).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def named(cell: str) -> list[tuple[str, str]]:
    """The tests that a cell names: file and function; nothing else may stand there."""
    assert re.fullmatch(r"`[^`]+`(, `[^`]+`)*", cell), cell
    return [tuple(name.split("::")) for name in re.findall(r"`([^`]+)`", cell)]


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_what_catches_it_is_there(row):
    for file, test in named(row[1]):
        assert test.startswith("test_")
        assert test in functions_of(file)


def test_what_was_made_for_the_list_stands_in_it():
    listed = {test for row in ROWS for file, test in named(row[1]) if file == MADE_FOR_IT}
    assert listed == {name for name in functions_of(MADE_FOR_IT) if name.startswith("test_")}
