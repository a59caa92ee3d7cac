# SPDX-License-Identifier: Apache-2.0
"""An OpenAI-compatible server, whoever serves it: prompts in, greedy answers out."""

from __future__ import annotations

import http.client
import json
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from entropykv_vllm.errors import RunError

# Requests at a time, and seconds until one is given up.
TOGETHER = 4
PATIENCE = 1800


class Refused(RunError):
    """The server does not take a request as it is."""


class Endpoint:
    """A server's `/completions`. It is sent token ids, or text if it does not take those."""

    def __init__(self, url: str, tokenizer: Any, model: str | None = None) -> None:
        """`url` ends with `/v1`; without `model` the first one that the server names is asked.

        Raises:
            RunError: if nothing answers there, in one sentence.
        """
        self.url = url.rstrip("/")
        self.tokenizer = tokenizer
        self.model = model or self._first_model()
        self.takes_ids = True

    def _first_model(self) -> str:
        models = self._call("/models")["data"]
        if not models:
            raise RunError(f"{self.url} names no model")
        return str(models[0]["id"])

    def answers(
        self,
        prompts: Sequence[list[int]],
        most: int,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> list[str]:
        """Return a greedy answer of at most `most` tokens to each prompt.

        Raises:
            RunError: if the server fails or refuses, in one sentence.
        """
        found = [self._first(prompts[0], most)]
        progress(1, len(prompts))
        with ThreadPoolExecutor(TOGETHER) as pool:
            for text in pool.map(lambda ids: self.complete(ids, most), prompts[1:]):
                found.append(text)
                progress(len(found), len(prompts))
        return found

    def _first(self, ids: list[int], most: int) -> str:
        """Complete a prompt, and learn from it whether the server takes token ids."""
        try:
            return self.complete(ids, most)
        except Refused:
            self.takes_ids = False
            return self.complete(ids, most)

    def complete(self, ids: list[int], most: int) -> str:
        """Return what the server writes after a prompt."""
        prompt = ids if self.takes_ids else self.tokenizer.decode(ids, skip_special_tokens=True)
        body = {"model": self.model, "prompt": prompt, "max_tokens": most, "temperature": 0}
        choices = self._call("/completions", body)["choices"]
        return str(choices[0]["text"])

    def _call(self, path: str, body: dict[str, Any] | None = None) -> Any:
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("OPENAI_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE) as reply:
                return json.load(reply)
        except urllib.error.HTTPError as error:
            kind = Refused if error.code in (400, 422) else RunError
            raise kind(f"{self.url}{path} says {error.code}: {_message(error)}") from None
        except (OSError, http.client.HTTPException, json.JSONDecodeError) as error:
            raise RunError(f"{self.url}{path} does not answer: {error}") from None


def _message(error: urllib.error.HTTPError) -> str:
    """Return what a server says in a reply that is an error, at most 300 characters of it."""
    text = error.read().decode(errors="replace")
    try:
        found = json.loads(text)
        text = str(found.get("error", found).get("message", text))
    except (json.JSONDecodeError, AttributeError):
        pass
    return " ".join(text.split())[:300]
