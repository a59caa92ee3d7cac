# SPDX-License-Identifier: Apache-2.0
"""What a Markdown page links to, and what can be linked to in it."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]

_FENCE = re.compile(r"^( *)(```|~~~).*?^\1\2 *$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"(`+)(?!`).*?(?<!`)\1(?!`)", re.DOTALL)
_LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^()\s]+)\)")
_HEADING = re.compile(r"^#{1,6} +(.*?) *#* *$", re.MULTILINE)


def links(text: str) -> list[str]:
    """The targets of a page's links and pictures; what stands in code is no link."""
    return _LINK.findall(_CODE.sub("", _FENCE.sub("", text)))


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub names them."""
    seen: Counter[str] = Counter()
    found = set()
    for heading in _HEADING.findall(_FENCE.sub("", text)):
        name = slug(heading)
        found.add(f"{name}-{seen[name]}" if seen[name] else name)
        seen[name] += 1
    return found


def slug(heading: str) -> str:
    """The anchor of a heading: its words in small letters, with dashes between them."""
    words = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
    return re.sub(r"[^\w\- ]", "", words).replace(" ", "-")


def block(page: str, name: str) -> list[list[str]]:
    """The cells of the rows of the table that stands after `<!-- name -->`, without its head."""
    text = (ROOT / page).read_text().split(f"<!-- {name} -->\n")[1].split("<!-- end -->")[0]
    rows = [line.strip("|").split("|") for line in text.splitlines()[2:]]
    return [[cell.strip() for cell in row] for row in rows]
