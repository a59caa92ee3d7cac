# SPDX-License-Identifier: Apache-2.0
"""The table of an evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from entropykv_vllm.evaluation import divergence, table
from entropykv_vllm.evaluation.eval.jobs import DIVERGENCE

HEADER = [
    "task",
    "tokens",
    "policy",
    "keep",
    "bits",
    "held %",
    "accuracy % (95 %)",
    "digits % (95 %)",
    "form % (95 %)",
    "KL in nats (95 %)",
    "perplexity",
]


def render(results: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of all results; columns that would be empty are left out."""
    rows = [_row(result, _text(result, results)) for result in _tasks(results)]
    used = [i for i in range(len(HEADER)) if i == 0 or any(row[i] for row in rows)]
    return table.render([HEADER[i] for i in used], [[row[i] for i in used] for row in rows])


def _tasks(results: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The rows: answers, or plain text if nothing else was asked for."""
    answers = [r for r in results if r["spec"]["task"] != DIVERGENCE]
    return answers or list(results)


def _text(result: Mapping[str, Any], results: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """What the same setting did to plain text of the same length."""
    same = ("tokens", "name")
    for other in results:
        if other["spec"]["task"] == DIVERGENCE and all(
            other["spec"][key] == result["spec"][key] for key in same
        ):
            return other
    return {}


def _row(result: Mapping[str, Any], text: Mapping[str, Any]) -> list[str]:
    spec = result["spec"]
    return [
        spec["task"],
        str(spec["tokens"]),
        label(spec),
        "" if spec["keep"] is None else f"{spec['keep']:g}",
        "" if spec["bits"] is None else str(spec["bits"]),
        table.percent(result["held"]) if result.get("held") is not None else "",
        *(
            table.interval(result[name]) if name in result else ""
            for name in ("accuracy", "digits", "form")
        ),
        divergence.nats(text["kl"]) if text else "",
        f"{text['perplexity']:.2f}" if text else "",
    ]


def label(spec: Mapping[str, Any]) -> str:
    """Return the name of a row's setting: a preset, a policy, the full cache or the server."""
    named = {"none": "full cache"}.get(spec["policy"], spec["policy"])
    return str(spec["name"] if spec["series"] == "presets" else named)
