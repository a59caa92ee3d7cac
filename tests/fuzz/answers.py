# SPDX-License-Identifier: Apache-2.0
"""What is wrong with an answer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from .cases import Case

#: What no client should read: where the server's code lies, and how it got there.
LEAKS = ("Traceback", "site-packages", "entropykv_vllm/", "vllm/entrypoints", 'File "', ".py:")
#: Of what is no HTTP, before any route.
NO_HTTP = b"Invalid HTTP request received."
#: How a stream ends, by the beginning of its route; of others nothing is known.
ENDS = {
    "/v1/completions": b"data: [DONE]",
    "/v1/chat/completions": b"data: [DONE]",
    "/inference/v1/generate": b"data: [DONE]",
    "/invocations": b"data: [DONE]",
    "/v1/messages": b"event: message_stop",
    "/v1/responses": b"event: response.completed",
}
#: The other end of an answer of /v1/responses: it was cut.
CUT = b"event: response.incomplete"


@dataclass(frozen=True)
class Answer:
    """What came back; status 0 if nothing did, and the body says why."""

    status: int
    body: bytes
    kind: str = ""

    @property
    def streamed(self) -> bool:
        """It came in events."""
        return "event-stream" in self.kind


def status_of(answer: Answer) -> int:
    """The status, which in a stream may stand in an event."""
    return _failed(answer.body) or answer.status if answer.streamed else answer.status


def faults(case: Case, answer: Answer) -> list[str]:
    """What is wrong, a sentence each."""
    status = status_of(answer)
    if status == 0 or status >= 500:
        return [f"HTTP {status}: {message(answer.body)[:300]}"]
    if case.right.statuses and status not in case.right.statuses:
        rights = " or ".join(map(str, case.right.statuses))
        return [f"HTTP {status} where {rights} is right: {message(answer.body)[:300]}"]
    if status >= 400:
        return _of_refusal(case, answer)
    return _of_stream(case, answer) if answer.streamed else _of_json(answer)


def message(body: bytes) -> str:
    """The sentence of a refusal, "" if there is none."""
    for part in [body, *(line[6:] for line in body.splitlines() if line.startswith(b"data: {"))]:
        said = _parsed(part)
        # FastAPI's own refusals have their sentence in `detail`.
        error = said.get("error", said.get("detail")) if isinstance(said, dict) else None
        if isinstance(error, dict):
            error = error.get("message")
        if error and isinstance(error, str):
            return error
    return NO_HTTP.decode() if body == NO_HTTP else ""


def listed(found: list[str]) -> str:
    """Faults as they are printed, whatever clients and servers wrote."""
    text = "\n".join(f"FAULT: {fault}" for fault in found)
    return text.encode("ascii", "backslashreplace").decode()


def _failed(body: bytes) -> int:
    """The status that an event of a stream tells, 0 if none does."""
    for line in body.splitlines():
        said = _parsed(line[6:]) if line.startswith(b"data: {") else None
        error: Any = said.get("error") if isinstance(said, dict) else None
        if isinstance(error, dict):
            code = error.get("code")
            return code if isinstance(code, int) else 500
    return 0


def _parsed(text: bytes) -> Any:
    """What is said in JSON; None if it is none."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def _of_refusal(case: Case, answer: Answer) -> list[str]:
    if case.method == "HEAD":
        return []
    said = message(answer.body)
    shown = said + answer.body.decode(errors="replace")
    found = [f"a refusal shows {leak!r}: {shown[:300]}" for leak in LEAKS if leak in shown]
    if not said:
        found.append(f"HTTP {answer.status} without a sentence: {answer.body[:300]!r}")
    elif case.right.words and not any(word in said for word in case.right.words):
        found.append(f"a refusal does not say {' or '.join(case.right.words)}: {said[:300]}")
    return found


def _of_stream(case: Case, answer: Answer) -> list[str]:
    lines = answer.body.splitlines()
    events = [line[6:] for line in lines if line.startswith(b"data: {")]
    if wrong := [event for event in events if _parsed(event) is None]:
        return [f"an event is not JSON: {wrong[0][:300]!r}"]
    if case.path == "/entropykv/events":
        begins = bool(lines) and lines[0].startswith(b'data: {"about": {')
        return [] if begins else [f"the page's events begin with {answer.body[:200]!r}"]
    end = ENDS.get(case.path)
    if end is None or end in lines or (end == ENDS["/v1/responses"] and CUT in lines):
        return []
    return [f"a stream ended early: {answer.body[-200:]!r}"]


def _of_json(answer: Answer) -> list[str]:
    if "json" not in answer.kind:
        return []
    try:
        json.loads(answer.body)
    except ValueError as error:
        return [f"not JSON ({error}): {answer.body[:200]!r}"]
    return []
