# SPDX-License-Identifier: Apache-2.0
"""The cells of an evaluation: what decides their results, and where those are kept."""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from entropykv_vllm.evaluation import cells, identity
from entropykv_vllm.evaluation.eval.grid import Setting

#: In place of a task's name: the next token's distribution after plain text.
DIVERGENCE = "kl"


@dataclass(frozen=True)
class Job:
    """A cell to run. `spec` decides its result, which `path` keeps."""

    spec: dict[str, Any]
    path: Path

    def result(self) -> dict[str, Any] | None:
        """Return the result, if there is one."""
        return cells.stored(self.spec, self.path)

    def finish(self, values: dict[str, Any]) -> None:
        """Keep the result."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        cells.store(self.spec, values, self.path)


def missing(jobs: Sequence[Job]) -> list[Job]:
    """Return the jobs that have no result yet."""
    return [job for job in jobs if job.result() is None]


def digest(values: dict[str, Any]) -> str:
    """Return a short name of a specification."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]


def job(out: Path, spec: dict[str, Any]) -> Job:
    """Return the job of a specification; the file's name has its digest."""
    name = f"{spec['task']}-{spec['tokens']}-{spec['name']}-{digest(spec)}"
    return Job(spec, out / "cells" / f"{name}.json")


def spec(args: argparse.Namespace, task: str, tokens: int, setting: Setting) -> dict[str, Any]:
    """Return what decides the result of a cell, whatever the backend."""
    on_top = args.question == "after" and task != DIVERGENCE
    return {
        "backend": args.backend,
        "task": task,
        "tokens": tokens,
        "name": setting.name,
        "series": setting.series,
        "policy": setting.policy,
        "keep": setting.keep,
        "bits": setting.bits,
        "eviction": setting.eviction,
        "model": args.model,
        "tokenizer": args.tokenizer,
        "text": args.text,
        "prompts": args.prompts,
        "seed": args.seed,
        "depths": args.depths,
        "question": args.question,
        **({"counted": "context"} if on_top else {}),
        **(identity.marks(args.model) if args.backend in ("offline", "engine") else {}),
    }
