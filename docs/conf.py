# SPDX-License-Identifier: Apache-2.0
"""How Sphinx makes a site of these pages: `make docs`."""

from __future__ import annotations

import re
from typing import Any

project = "EntropyKV"
html_title = "EntropyKV for vLLM"
html_theme = "furo"
html_show_copyright = False
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False

extensions = ["myst_parser"]
# Links name headings as GitHub does, so that they work there, too.
myst_heading_anchors = 4
highlight_language = "none"
exclude_patterns = ["data", "lm-eval"]


def menu(start: str) -> str:
    """The site's menu, out of the lists of the start page: a caption for each heading with a list.

    So there is one place for both, and the page is plain Markdown.
    """
    blocks = []
    for section in re.split(r"^## ", start, flags=re.MULTILINE)[1:]:
        caption, _, body = section.partition("\n")
        pages = re.findall(r"^- \[[^\]]*\]\(([\w-]+)\.md\)", body, re.MULTILINE)
        if pages:
            options = [":hidden:", f":caption: {caption}"]
            blocks.append("\n".join(["```{toctree}", *options, "", *pages, "```"]))
    return "\n\n".join(blocks)


def _prepare(app: object, page: str, source: list[str]) -> None:
    # Markdown that is no page of the site is a file to download.
    text = re.sub(r"\]\(((?:\.\./|data/)[^)]*\.md)\)", r"](path:\1)", source[0])
    source[0] = f"{text}\n\n{menu(text)}\n" if page == "index" else text


def setup(app: Any) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("source-read", _prepare)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
