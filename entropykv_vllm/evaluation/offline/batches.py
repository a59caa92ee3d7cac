# SPDX-License-Identifier: Apache-2.0
"""Cells cut into batches that share a page size and fit into memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from entropykv_vllm.evaluation.offline.cell import Layout
from entropykv_vllm.evaluation.offline.model import Model

#: Bytes of the caches that are held at once.
ROOM = 3 << 30


def batches(
    model: Model, layouts: Sequence[Layout], dtype: torch.dtype, tokens: int
) -> Iterator[list[int]]:
    """Yield the indices of layouts that go together, for contexts of `tokens` tokens."""
    token = 2 * model.heads * model.head_size * dtype.itemsize * len(model.full)
    size = max(1, ROOM // (tokens * token))
    for page in sorted({layout.page for layout in layouts}):
        alike = [i for i, layout in enumerate(layouts) if layout.page == page]
        yield from (alike[i : i + size] for i in range(0, len(alike), size))
