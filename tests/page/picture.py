# SPDX-License-Identifier: Apache-2.0
"""`make page-picture`: the picture of the live page in docs/page.md, with four requests running."""

from __future__ import annotations

import time
from pathlib import Path

from PIL import Image

from entropykv_vllm.evaluation import corpus
from entropykv_vllm.evaluation.server import serving
from entropykv_vllm.model import fetch_model

from .browser import browsing
from .live import ARGUMENTS, running

PICTURE = Path(__file__).parents[2] / "docs/images/page.png"
PROMPTS, CHARACTERS, ANSWER = 4, 7000, 500
#: Seconds of answers before the picture is taken, and the most until something is drawn.
SHOWN, PATIENCE = 20, 300


def main() -> None:
    """Start a server, have it answer, and save what a browser shows."""
    text = corpus.text()
    prompts = [text[start * 20_000 :][:CHARACTERS] for start in range(PROMPTS)]
    with (
        serving(str(fetch_model(quiet=True)), ARGUMENTS) as (url, _),
        running(url, prompts, ANSWER),
        browsing() as tab,
    ):
        tab.show(1120, 1500)
        tab.open(f"{url}/entropykv")
        tab.wait("document.querySelector('#requests button')", PATIENCE)
        tab.value("document.querySelector('#requests button').click()")
        tab.wait("document.querySelectorAll('#text span.k2').length > 40", PATIENCE)
        time.sleep(SHOWN)
        tab.picture(PICTURE)
    with Image.open(PICTURE) as image:  # a third of the bytes
        few = image.convert("RGB").quantize(64)
    few.save(PICTURE, optimize=True)
    print(f"wrote {PICTURE} ({PICTURE.stat().st_size / 1024:.0f} KB)")


if __name__ == "__main__":
    main()
