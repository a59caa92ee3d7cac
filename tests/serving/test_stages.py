# SPDX-License-Identifier: Apache-2.0
"""Workers of a pipeline stage, which has layers of some page groups only."""

from types import SimpleNamespace

import pytest
import torch

from entropykv_vllm.pages.moves import PageMove
from entropykv_vllm.plan.schedule import TierPlan
from entropykv_vllm.serving.worker import EvictionWorkerMixin, PagesInRows, TierLayers

PLAN = TierPlan("t", 32, 32, 128, 96, 64, 0.5, 0)
MOVE = PageMove(0, 0, "a", (0, 1, 2, 3), (5, 6, 7, 8), (5, 6), 0)


class InRows(PagesInRows, EvictionWorkerMixin):
    """A worker whose caches are those of GPUs."""


@pytest.mark.parametrize("kind", [EvictionWorkerMixin, InRows])
def test_a_move_of_layers_elsewhere_rewrites_rows_only(kind, monkeypatch):
    rows, moved = {}, []
    worker = kind.__new__(kind)
    worker._tables = SimpleNamespace(rewrite=lambda *row: rows.setdefault(row[:2], row[2]))
    worker._tier_layers = {0: TierLayers(PLAN, [], [])}
    worker._carry_out([MOVE], set())
    assert rows == {("a", 0): {0: 5, 1: 6, 2: 0, 3: 0}}
    monkeypatch.setattr(kind, "_move_pages", lambda self, moves: moved.extend(moves))
    worker._tier_layers = {0: TierLayers(PLAN, [torch.zeros(9, 1, 32, 8)], [None])}
    worker._carry_out([MOVE], set())
    assert moved == [MOVE]
