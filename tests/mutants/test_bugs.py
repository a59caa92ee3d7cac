# SPDX-License-Identifier: Apache-2.0
"""Each bug still fits the sources, and docs/testing.md says what catches it."""

from pathlib import Path

import pytest

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
    assert f"`{Path(bug.tests).name}" in rows[0]
