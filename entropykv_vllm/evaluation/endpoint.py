# SPDX-License-Identifier: Apache-2.0
"""An OpenAI-compatible server, whoever serves it: prompts in, greedy answers out."""

from __future__ import annotations

import http.client
import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Any

from entropykv_vllm.errors import RunError
from entropykv_vllm.evaluation.together import together

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
        return self._text("/models", None, ("data", 0, "id"), "names no model")

    def answers(self, prompts: Sequence[list[int]], most: int) -> Iterator[str]:
        """Yield a greedy answer of at most `most` tokens to each prompt, in their order.

        Raises:
            RunError: if the server fails or refuses, in one sentence.
        """
        yield self._first(prompts[0], most)
        yield from together(lambda ids: self.complete(ids, most), prompts[1:], TOGETHER)

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
        return self._text("/completions", body, ("choices", 0, "text"), "answers without a text")

    def _text(
        self, path: str, body: dict[str, Any] | None, place: Sequence[str | int], lack: str
    ) -> str:
        """Return the text that lies at `place` in a reply; `lack` says that there is none."""
        found = reply = self._call(path, body)
        try:
            for key in place:
                found = found[key]
        except (TypeError, LookupError):
            found = None
        if not isinstance(found, str):
            raise RunError(f"{self.url}{path} {lack}: {_short(json.dumps(reply))}")
        return found

    def _call(self, path: str, body: dict[str, Any] | None = None) -> Any:
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("OPENAI_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(self.url + path, data, headers)
            with urllib.request.urlopen(request, timeout=PATIENCE) as reply:
                return json.load(reply)
        except urllib.error.HTTPError as error:
            kind = Refused if error.code in (400, 422) else RunError
            raise kind(f"{self.url}{path} says {error.code}: {_message(error)}") from None
        except (OSError, http.client.HTTPException) as error:
            raise RunError(f"{self.url}{path} does not answer: {error}") from None
        except ValueError as error:  # an address, bytes or words that are none
            raise RunError(f"{self.url}{path} does not answer with JSON: {error}") from None


def _message(error: urllib.error.HTTPError) -> str:
    """Return what a server says in a reply that is an error, at most 300 characters of it."""
    text = ""
    try:
        text = error.read().decode(errors="replace")
        found = json.loads(text)
        text = str(found.get("error", found).get("message", text))
    except (OSError, http.client.HTTPException, ValueError, AttributeError):
        pass
    return _short(text)


def _short(text: str) -> str:
    return " ".join(text.split())[:300]
