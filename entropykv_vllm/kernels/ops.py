# SPDX-License-Identifier: Apache-2.0
"""The ops on pages: those of `csrc/` where they were built, else the same in plain torch."""

from __future__ import annotations

from typing import Any

import torch

from entropykv_vllm.kernels import native, reference

#: What runs the ops in this process: `torch.ops.entropykv`, or `kernels.reference`.
_OPS: Any = torch.ops.entropykv if native.load() else reference

write = _OPS.write
attention = _OPS.attention
observe = _OPS.observe
collapse = _OPS.collapse
drop = _OPS.drop


def description() -> str:
    """What runs the ops, for a log line."""
    if _OPS is reference:
        return "plain torch, slow: the package was built without its native kernels"
    return f"native, {native.isa()}"
