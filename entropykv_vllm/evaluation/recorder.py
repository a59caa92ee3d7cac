# SPDX-License-Identifier: Apache-2.0
"""A logits processor that writes down each next-token distribution and forces the next token.

It is loaded by name into vLLM's worker process, so what it saw leaves that process in files. A
request takes part if its `extra_args` are those of `Recorder.arguments`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

NAME = f"{__name__}:Recorder"


class Forced:
    """One request's: leaves one token of each row of logits possible, and records the rows.

    Without a prefix nothing is recorded. After the last forced token the request goes on freely.
    """

    def __init__(self, prefix: str | None, ids: list[int]) -> None:
        self.prefix = prefix
        self.ids = ids

    def __call__(self, output_ids: list[int], logits: Tensor) -> Tensor:
        """Treat the logits `[vocabulary]` of the token after `output_ids`, in place.

        vLLM asks at each part of a prompt that it reads, and for a preempted request again; it is
        the last row of a step that counts.
        """
        step = len(output_ids)
        if step < len(self.ids):
            if self.prefix is not None:
                np.save(f"{self.prefix}{step}.npy", logits.float().log_softmax(-1).cpu().numpy())
            logits.fill_(-torch.inf)
            logits[self.ids[step]] = 0
        return logits


class Recorder(AdapterLogitsProcessor):
    """`Forced` for each request that asks for it."""

    @staticmethod
    def arguments(prefix: str | None, ids: list[int]) -> dict[str, Any]:
        """The `extra_args` of a request that decodes `ids`; files start with `prefix`, if any."""
        return {"record_prefix": prefix, "forced_ids": ids}

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: Any) -> Forced | None:
        asked = params.extra_args or {}
        if "forced_ids" not in asked:
            return None
        return Forced(asked["record_prefix"], asked["forced_ids"])


def prefix(folder: str, request: int) -> str:
    """How the names of a request's files start."""
    return str(Path(folder) / f"{request}-")


def read(folder: str, request: int, steps: int) -> Tensor:
    """The log-probabilities of a request, float32 `[steps, vocabulary]`."""
    rows = [np.load(f"{prefix(folder, request)}{step}.npy") for step in range(steps)]
    return torch.from_numpy(np.stack(rows))
