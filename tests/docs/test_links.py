# SPDX-License-Identifier: Apache-2.0
"""Every link, anchor and picture of the pages is there, and every page is in the menu."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from tests.docs.markdown import ROOT, anchors, links

DOCS = ROOT / "docs"
START = DOCS / "index.md"
PAGES = [*sorted(DOCS.glob("*.md")), *sorted(ROOT.glob("*.md")), ROOT / "csrc/README.md"]


def broken(page: Path, text: str) -> list[str]:
    """The links of a page that lead nowhere in this repository."""
    return [link for link in links(text) if not _leads_somewhere(page, text, link)]


def _leads_somewhere(page: Path, text: str, link: str) -> bool:
    if re.match(r"[a-z]+:", link):
        return True
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    if not target.is_relative_to(ROOT) or not target.exists():
        return False
    return not anchor or anchor in anchors(text if not path else target.read_text())


def menu() -> list[str]:
    """The pages of the site's menu, in its order."""
    spec = importlib.util.spec_from_file_location("conf", DOCS / "conf.py")
    assert spec is not None
    assert spec.loader is not None
    conf = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(conf)
    return re.findall(r"^[\w-]+$", conf.menu(START.read_text()), re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_every_link_leads_somewhere(page):
    assert broken(page, page.read_text()) == []


def test_every_page_is_in_the_menu_once():
    pages = sorted(page.stem for page in DOCS.glob("*.md") if page != START)
    assert sorted(menu()) == pages, "a page is in the menu if a list of docs/index.md names it"


@pytest.mark.parametrize(
    "text",
    [
        "[a page](nowhere.md)",
        "[an anchor](cli.md#nowhere)",
        "[here](#nowhere)\n\n# Somewhere\n",
        "![a picture](images/nowhere.png)",
        "[outside](../../elsewhere.md)",
        "# A heading\n\n[`code`](nowhere.md)",
    ],
)
def test_a_broken_link_is_found(text):
    assert len(broken(START, text)) == 1


@pytest.mark.parametrize(
    "text",
    [
        "[a page](cli.md), [an anchor](cli.md#bench), [a folder](data)",
        "[second](#twice-1)\n\n## Twice\n\n## Twice\n",
        "[code](#which-layers-entropykv-x)\n\n## Which layers: `entropykv x`\n",
        "[the web](https://example.org/nowhere#there)",
        "```\n[code](nowhere.md)\n```\n`[code](nowhere.md)`",
    ],
)
def test_a_good_link_is_not(text):
    assert broken(START, text) == []
