# SPDX-License-Identifier: Apache-2.0
"""A server with the page on, requests that run on it, and what the page is told meanwhile."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import quote

from entropykv_vllm.evaluation.server import SERVED_NAME

SETTINGS = {"bits": 4, "keep": 0.4, "window": 256, "interval": 512, "lara_keep": 0.3}
ARGUMENTS = [
    *("--kv-eviction", "entropykv", "--kv-eviction-config", json.dumps(SETTINGS)),
    *("--kv-cache-dtype", "bfloat16", "--enforce-eager", "--kv-eviction-ui-text"),
]
#: What a page must show and never obey.
HOSTILE = "</script><img src=x onerror=\"document.title='broken'\"> <b>bold</b> &amp; 日本語 🙂 "


def complete(url: str, prompt: str, tokens: int) -> None:
    """Have a prompt answered with so many tokens."""
    body = {"model": SERVED_NAME, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
    request = urllib.request.Request(
        f"{url}/v1/completions",
        json.dumps({**body, "temperature": 0}).encode(),
        {"Content-Type": "application/json"},
    )
    urllib.request.urlopen(request, timeout=600).close()


@contextmanager
def running(url: str, prompts: list[str], tokens: int) -> Iterator[None]:
    """Have prompts answered beside the block, which ends when they are."""
    threads = [threading.Thread(target=complete, args=(url, text, tokens)) for text in prompts]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for thread in threads:
            thread.join()


def events(url: str, request: str | None = None) -> Iterator[dict]:
    """What the page is told, until the caller has seen enough."""
    query = "" if request is None else f"?request={quote(request)}"
    with urllib.request.urlopen(f"{url}/entropykv/events{query}", timeout=120) as answer:
        for line in answer:
            if line.startswith(b"data: "):
                yield json.loads(line.removeprefix(b"data: "))
