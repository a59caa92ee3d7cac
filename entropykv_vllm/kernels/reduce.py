# SPDX-License-Identifier: Apache-2.0
"""Float32 reductions whose bits do not depend on the batch.

``torch.sum`` promises no order of additions. Over a dimension that is not the innermost one, a
column's order depends on whether it falls into the full vectors or the remainder of a thread's
share, and the share depends on the batch: the same segment could get other bits, and so other
survivors. Over a contiguous innermost dimension each row is added alone, and elementwise additions
have no order.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

EPS = 1e-12


def rows(x: Tensor) -> Tensor:
    """``x`` as float32 with contiguous rows, so that sums over its last dimension are fixed."""
    return x.to(torch.float32).contiguous()


def length(x: Tensor) -> Tensor:
    """L2 norms over the last dimension, clamped to what float32 can divide by and multiply with.

    Args:
        x: float32 ``[..., n]`` with contiguous rows.
    """
    return torch.linalg.vector_norm(x, dim=-1).clamp(EPS, torch.finfo(torch.float32).max)


def tree_sum(x: Tensor) -> Tensor:
    """Sum ``x`` ``[..., n, m]`` over n, pairwise in a fixed order, to ``[..., m]``."""
    while (n := x.shape[-2]) > 1:
        x = pad(x, (0, 0, 0, 1)) if n % 2 else x
        x = x[..., : x.shape[-2] // 2, :] + x[..., x.shape[-2] // 2 :, :]
    return x.squeeze(-2)
