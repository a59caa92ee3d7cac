# SPDX-License-Identifier: Apache-2.0
"""Findings in a file, so that they can be sent to another server."""

from __future__ import annotations

import base64
import json
from pathlib import Path

from .cases import Case
from .clients import Finding

PATH = Path("build/fuzz/findings.jsonl")


def write(findings: list[Finding]) -> None:
    """Keep the findings of a run in place of those of the last one."""
    PATH.parent.mkdir(parents=True, exist_ok=True)
    PATH.write_text("".join(json.dumps(_line(finding)) + "\n" for finding in findings))


def _line(finding: Finding) -> dict[str, object]:
    case = finding.case
    body = None if case.body is None else base64.b64encode(case.body).decode()
    return {
        **{"index": finding.index, "faults": finding.faults},
        **{"kind": case.kind, "method": case.method, "target": case.target},
        **{"headers": dict(case.headers), "body": body},
    }


def read() -> list[Case]:
    """The requests of the last run that were not answered right."""
    if not PATH.exists():
        return []
    return [_case(json.loads(line)) for line in PATH.read_text().splitlines()]


def _case(said: dict[str, object]) -> Case:
    body = None if said["body"] is None else base64.b64decode(str(said["body"]))
    headers = said["headers"]
    assert isinstance(headers, dict)
    return Case(str(said["kind"]), str(said["method"]), str(said["target"]), body, headers)
