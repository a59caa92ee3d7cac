# SPDX-License-Identifier: Apache-2.0
"""H2O (arXiv 2306.14048): heavy hitters, the tokens that all queries so far attended to."""

import torch
from torch import Tensor

#: All queries so far count.
QUERIES = None


def score(mass: Tensor) -> Tensor:
    """The accumulated mass itself: float ``[..., heads, tokens]`` to float32, same shape."""
    return mass.to(torch.float32)
