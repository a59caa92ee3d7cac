# SPDX-License-Identifier: Apache-2.0
"""The page of a real server while a request runs, in a browser where there is one."""

import base64
import contextlib
import os
import signal
import threading
import time

import numpy as np
import psutil
import pytest

from entropykv_vllm.evaluation import corpus
from entropykv_vllm.evaluation.server import serving

from ..engine.conftest import model_folder
from .browser import browsing, executable
from .live import ARGUMENTS, HOSTILE, events, running

pytestmark = pytest.mark.engine

ANSWER = 96
#: Seconds in which a server must end although somebody looks at its page.
SOON = 30
#: Whether the map has a pixel of a colour of the style sheet.
PAINTED = """(() => {
  const map = document.getElementById("map"), dot = document.createElement("canvas");
  const pen = dot.getContext("2d");
  pen.fillStyle = getComputedStyle(document.documentElement).getPropertyValue("--%s");
  pen.fillRect(0, 0, 1, 1);
  const wanted = pen.getImageData(0, 0, 1, 1).data.join();
  const { data } = map.getContext("2d").getImageData(0, 0, map.width, map.height);
  for (let i = 0; i < data.length; i += 4)
    if (data.slice(i, i + 4).join() === wanted) return true;
  return false;
})()"""


@pytest.fixture(scope="module")
def url():
    with serving(model_folder(), ARGUMENTS) as (address, _):
        yield address


@pytest.fixture(scope="module")
def prompt() -> str:
    return HOSTILE + corpus.text()[:5000]


def name_of_the_request(url: str) -> str:
    return next(event["requests"][0]["id"] for event in events(url) if event.get("requests"))


def test_the_page_is_told_what_the_plan_holds_of_a_request_and_its_text(url, prompt):
    text, kept = "", {}
    with running(url, [prompt], ANSWER):
        for event in events(url, name_of_the_request(url)):
            story = event.get("story", {})
            text += "".join(story.get("text", {}).get("pieces", []))
            for tier, told in story.get("tiers", {}).items():
                kept.setdefault(tier, {}).update(told)
            if story.get("ended"):
                break
        tiers = {tier["name"]: tier for tier in event["tiers"]}
    assert text.startswith(prompt), "and the answer"
    assert len(text) > len(prompt)
    assert set(kept) == {"early", "middle", "late"}
    assert sorted(layer for tier in tiers.values() for layer in tier["layers"]) == list(range(30))
    for name, told in kept.items():
        shares = np.frombuffer(base64.b64decode(told["shares"]), np.uint8) / 255
        assert len(shares) == told["hot"] > 0
        assert shares[: tiers[name]["sinks"]].min() == 1, "sinks stay"
        assert 0 < shares.min() < shares.max() or shares.min() == 0
        # Each head holds whole cold pages.
        held = shares.sum() / tiers[name]["cold"]
        assert held == pytest.approx(round(held), abs=0.02)
        band_sum = sum((end - first) * share for first, end, share in told["bands"])
        assert shares.sum() == pytest.approx(band_sum, rel=0.01)


@pytest.mark.skipif(executable() is None, reason="there is no Chromium on this machine")
def test_a_browser_draws_it_and_runs_nothing_that_is_in_a_text(url, prompt):
    with browsing() as tab, contextlib.ExitStack() as requests:
        tab.show(1280, 900)
        tab.open(f"{url}/entropykv")
        # Once the browser is there, which takes its time, lest the answer be over by then.
        requests.enter_context(running(url, [prompt], 4 * ANSWER))
        tab.wait("document.querySelector('#requests button')", 60)
        tab.value("document.querySelector('#requests button').click()")
        tab.wait("document.querySelectorAll('#text span.k8').length > 4", 60)
        shown = tab.value("document.getElementById('text').textContent")
        assert shown.startswith(prompt[:2000])
        assert tab.value("document.querySelectorAll('main img, main script').length") == 0
        tab.wait("document.querySelectorAll('#text span.k0, #text span.k1').length > 4", 60)
        for kind in ("hot", "cold4", "freed"):
            tab.wait(PAINTED % kind, 30)
        assert "hot, so held by all" not in tab.value("document.body.innerText")
        over = "new PointerEvent('pointerover', {bubbles: true})"
        tab.value(f"document.querySelector('#text span').dispatchEvent({over})")
        assert "Token 0 “</”: held by 100 % of the heads" in tab.value("document.body.innerText")
        for width in (400, 1600):
            tab.show(width, 900, "dark")
            assert tab.value("document.documentElement.scrollWidth") == width
        assert tab.value("document.title") == "EntropyKV"
        assert tab.complaints == []


def test_a_server_that_is_looked_at_ends_when_it_is_told_to(url):
    """The last test of this server."""
    seen = threading.Event()

    def look() -> None:
        for event in events(url):
            if event.get("tiers"):
                seen.set()

    lookers = [threading.Thread(target=look) for _ in range(3)]
    for looker in lookers:
        looker.start()
    assert seen.wait(60)
    port = int(url.rpartition(":")[2])
    server = next(
        child
        for child in psutil.Process().children()
        if any(c.laddr.port == port and c.status == "LISTEN" for c in child.net_connections())
    )
    begun = time.monotonic()
    os.kill(server.pid, signal.SIGTERM)
    for looker in lookers:
        looker.join(SOON)
        assert not looker.is_alive()
    server.wait(SOON)
    assert time.monotonic() - begun < SOON
