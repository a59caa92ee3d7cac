# SPDX-License-Identifier: Apache-2.0
"""No score at all: the oldest tokens stay (StreamingLLM's sinks, arXiv 2309.17453)."""

import torch
from torch import Tensor


def score(keys: Tensor, values: Tensor) -> Tensor:
    """``-index``: float ``[..., tokens, head_size]`` to float32 ``[..., tokens]``."""
    tokens = torch.arange(keys.shape[-2], dtype=torch.float32, device=keys.device)
    return (-tokens).expand(keys.shape[:-1])
