# SPDX-License-Identifier: Apache-2.0
"""Each bug still fits the sources, and docs/testing.md says what catches it."""

import re
from pathlib import Path

import pytest

from .__main__ import failed_in
from .bugs import BUGS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/testing.md").read_text()


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_bug_fits_the_sources(bug):
    text = (ROOT / bug.file).read_text()
    assert bug.put_into(text) != text
    assert (ROOT / bug.tests).is_file()


def test_a_bug_that_fits_no_more_is_told():
    with pytest.raises(ValueError, match="fits no more"):
        BUGS[0].put_into("")


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_the_page_lists_it(bug):
    rows = [line for line in PAGE.splitlines() if line.startswith(f"| {bug.name} |")]
    assert len(rows) == 1
    assert f"`{bug.file}`" in rows[0]
    file, test = re.findall(r"`(\w+\.py)::(\w+)`", rows[0])[-1]
    assert file == Path(bug.tests).name
    assert f"def {test}(" in (ROOT / bug.tests).read_text()


@pytest.mark.parametrize(
    ("printed", "test"),
    [
        ("FAILED tests/pages/test_x.py::test_it[3] - assert 0", "test_x.py::test_it"),
        ("ERROR tests/pages/test_x.py::test_it - KeyError", "test_x.py::test_it"),
        ('  File "/x/test_x.py", line 3 in test_it\n', "test_x.py::test_it"),
        ("ERROR tests/pages/test_x.py - SyntaxError: invalid syntax", None),
        ("no tests ran in 0.01s", None),
    ],
)
def test_only_a_test_catches_a_bug(printed, test):
    assert failed_in(printed) == test
