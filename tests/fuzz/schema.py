# SPDX-License-Identifier: Apache-2.0
"""Bodies and queries that schemathesis makes from the server's own OpenAPI."""

from __future__ import annotations

import json
import urllib.request
from contextlib import suppress
from functools import lru_cache
from typing import Any

import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.core import NOT_SET

#: Values that are drawn together: a run of hypothesis begins with the plainest.
EACH = 5
#: Routes that change the server for all: they are not for those who ask it something.
ADMIN = ("scale_elastic_ep", "fault_tolerance", "lora_adapter", "profile", "abort_requests")

Value = tuple[str, dict[str, Any], Any]


class Schema:
    """The operations of a server, and random values for each."""

    def __init__(self, text: dict[str, Any]) -> None:
        self.text, self.schema = text, schemathesis.openapi.from_dict(text)
        self.operations = [
            (path, method)
            for path, methods in sorted(text["paths"].items())
            for method in sorted(methods)
            if not any(word in path for word in ADMIN)
        ]

    def value(self, path: str, method: str, good: bool, number: int) -> Value:
        """The path, the query and the body of one request; the same for the same number."""
        values = self._batch(path, method, good, number // EACH)
        return values[number % len(values)]

    @lru_cache(maxsize=256)  # noqa: B019
    def _batch(self, path: str, method: str, good: bool, number: int) -> list[Value]:
        mode = GenerationMode.POSITIVE if good else GenerationMode.NEGATIVE
        found: list[Value] = []

        @seed(number)
        @settings(
            database=None,
            deadline=None,
            max_examples=EACH,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(self.schema[path][method.upper()].as_strategy(generation_mode=mode))
        def draw(case: Any) -> None:
            body = None if case.body is NOT_SET else case.body
            found.append((case.formatted_path, dict(case.query), body))

        with suppress(Unsatisfiable):  # nothing can be wrong where nothing is asked for
            draw()
        return found or [(path, {}, None)]

    def takes(self, path: str, field: str) -> bool:
        """Does the body of a POST have such a field?"""
        body = self.text["paths"][path].get("post", {}).get("requestBody", {})
        said = body.get("content", {}).get("application/json", {}).get("schema", {})
        parts = [said, *said.get("anyOf", []), *said.get("oneOf", [])]
        return any(field in self._resolved(part).get("properties", {}) for part in parts)

    def _resolved(self, said: dict[str, Any]) -> dict[str, Any]:
        name = said.get("$ref", "").rpartition("/")[2]
        return self.text["components"]["schemas"][name] if name else said


def schema_of(url: str) -> Schema:
    """Read the schema of a server."""
    with urllib.request.urlopen(f"{url}/openapi.json", timeout=60) as answer:
        return Schema(json.load(answer))
