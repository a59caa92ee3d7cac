# SPDX-License-Identifier: Apache-2.0
"""Puts tables into a page: each replaces what stands between its two marks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path


def fill(path: Path, tables: Mapping[str, str]) -> list[str]:
    """Replace the tables of a Markdown page; return the names that it has no marks for.

    A table's place is `<!-- table NAME -->` up to `<!-- end -->`. The rest is left as it is.
    """
    text, unknown = path.read_text(), []
    for name, content in tables.items():
        mark = re.compile(rf"(<!-- table {re.escape(name)} -->\n).*?(\n<!-- end -->)", re.DOTALL)
        if found := mark.search(text):
            text = f"{text[: found.end(1)]}{content}{text[found.start(2) :]}"
        else:
            unknown.append(name)
    path.write_text(text)
    return unknown
