# SPDX-License-Identifier: Apache-2.0
"""The pages of several cells beside each other: planned as in a scheduler, moved as in a worker.

Every cell has as many page slots a layer as its tokens need before anything is freed, and moves
are carried out in place, so a table entry of the plan is a fixed page here.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby

import torch
from torch import Tensor

from entropykv_vllm.evaluation.offline import variants
from entropykv_vllm.evaluation.offline.cell import Layout
from entropykv_vllm.evaluation.offline.model import Call, Model
from entropykv_vllm.evaluation.offline.reading import Reading
from entropykv_vllm.kernels import moves, native, ops
from entropykv_vllm.kernels.formats import cold_capacity
from entropykv_vllm.kernels.scores import OBSERVED
from entropykv_vllm.plan import schedule
from entropykv_vllm.plan.schedule import Move, TierPlan


class Pages:
    """The caches of cells with one page size, for all layers with full attention.

    `positions` has the position of the token in each slot.
    """

    def __init__(
        self, model: Model, layouts: Sequence[Layout], dtype: torch.dtype, tokens: int
    ) -> None:
        self.layouts = layouts
        self.frequencies = model.frequencies()
        self.page = layouts[0].page
        self.layers = len(model.full)
        self.per = -(-tokens // self.page)
        pages = len(layouts) * self.layers * self.per
        slots = max(plan.cold for layout in layouts for plan in layout.plans)
        shape = pages, model.heads, self.page, 2 * model.head_size
        self.cache = torch.zeros(shape, dtype=dtype)
        self.positions = torch.zeros(pages, model.heads, max(slots, self.page))
        self._done = [[0] * self.layers for _ in layouts]
        self.bits = torch.tensor([[plan.bits for plan in layout.plans] for layout in layouts])

    def first(self, cell: int, layer: int) -> int:
        """The page of a cell's first entry in a layer."""
        return (cell * self.layers + layer) * self.per

    def fill(self, reading: Reading, full: list[int]) -> None:
        """Put a text into the hot pages of all cells."""
        for i, layer in enumerate(full):
            start = self.first(0, i) * self.page
            slots = torch.arange(start, start + reading.tokens)
            ops.write(*reading.rows[layer], self.cache, slots)
        size = self.layers * self.per
        at = torch.arange(self.per * self.page).view(self.per, 1, self.page).float()
        self.positions[:size, :, : self.page] = at.repeat(self.layers, 1, 1)
        for cell in range(1, len(self.layouts)):
            part = slice(cell * size, (cell + 1) * size)
            self.cache[part] = self.cache[:size]
            self.positions[part] = self.positions[:size]

    def free(self, reading: Reading, position: int) -> None:
        """Carry out the moves of all boundaries up to a position, each once."""
        for cell, layout in enumerate(self.layouts):
            for plan in dict.fromkeys(layout.plans):
                layers = [i for i, other in enumerate(layout.plans) if other == plan]
                done = self._done[cell]
                while done[layers[0]] + plan.interval <= position:
                    at = done[layers[0]] + plan.interval
                    self._move(reading, cell, layers, plan, at)
                    for layer in layers:
                        done[layer] = at

    def _move(
        self, reading: Reading, cell: int, layers: list[int], plan: TierPlan, at: int
    ) -> None:
        planned = [move for move in schedule.moves(plan, at) if move.dst]
        # Scores given to a call are from before it: its moves must not read what they wrote.
        key = _shape if _native(self.layouts[cell]) else id
        for _, alike in groupby(planned, key=key):
            self._move_alike(reading, cell, layers, plan, at, list(alike))

    def _move_alike(
        self,
        reading: Reading,
        cell: int,
        layers: list[int],
        plan: TierPlan,
        at: int,
        alike: list[Move],
    ) -> None:
        layout, first = self.layouts[cell], [self.first(cell, layer) for layer in layers]
        batch = moves.Batch(
            alike[0].kind,
            plan.bits,
            src=torch.tensor([[f + e for e in m.src] for m in alike for f in first]),
            dst=torch.tensor([[f + p.entry for p in m.dst] for m in alike for f in first]),
            sinks=torch.tensor([m.sinks for m in alike for _ in first]),
        )
        scores = self._scores(reading, layout, layers * len(alike), batch, at)
        moves.move(self.cache, batch, layout.config, scores, side=self.positions)

    def _scores(
        self,
        reading: Reading,
        layout: Layout,
        layers: list[int],
        batch: moves.Batch,
        at: int,
    ) -> Tensor | None:
        """Scores that are not those of the pages' bytes alone, ``[moves, heads, tokens]``."""
        if _native(layout):
            return None
        tokens = cold_capacity(self.cache, batch.bits_read)
        where = self.positions[batch.src][..., :tokens].transpose(1, 2).flatten(2).long()
        if (name := layout.cell.score or layout.config.policy) not in OBSERVED:
            return variants.scores(name, self.cache, batch, where, self.frequencies)
        seen = OBSERVED[name]
        mass = reading.mass(seen.queries, at)[layers]
        return seen.score(mass.gather(2, where))

    def write(self, layer: int, start: int, key: Tensor, value: Tensor) -> None:
        """Store new tokens ``[cells, tokens, heads, head_size]`` from a position on."""
        cells, tokens = key.shape[:2]
        first = torch.tensor([self.first(cell, layer) for cell in range(cells)]) * self.page
        slots = first[:, None] + torch.arange(start, start + tokens)
        ops.write(key.flatten(0, 1), value.flatten(0, 1), self.cache, slots.flatten())
        self._note(layer, start, tokens)

    def _note(self, layer: int, start: int, tokens: int) -> None:
        """Remember the positions of new tokens."""
        at = torch.arange(start, start + tokens)
        for cell in range(len(self.layouts)):
            pages = self.first(cell, layer) + at // self.page
            self.positions[pages, :, at % self.page] = at[:, None].float()

    def attend(self, layer: int, start: int, call: Call) -> Tensor:
        """Attention of new tokens that lie between two boundaries, once they are written."""
        cells, new = call.query.shape[:2]
        query = call.query.contiguous()
        out = torch.empty_like(query)
        table, cold, hot = self._table(layer, start, new)
        for bits in self.bits[:, layer].unique().tolist():
            rows = (self.bits[:, layer] == bits).nonzero().flatten()
            everyone = len(rows) == cells
            part = query if everyone else query[rows]
            result = out if everyone else torch.empty_like(part)
            ops.attention(
                part.flatten(0, 1),
                self.cache,
                result.flatten(0, 1),
                torch.arange(0, new * len(rows) + 1, new, dtype=torch.int32),
                table[rows],
                cold[rows],
                hot[rows],
                bits,
                call.scale,
                call.softcap,
                None,
            )
            if not everyone:
                out[rows] = result
        return out

    def _table(self, layer: int, start: int, new: int) -> tuple[Tensor, Tensor, Tensor]:
        """As the attention op takes them: the table, cold pages and hot tokens of each cell."""
        found = [entries(layout.plans[layer], start, new) for layout in self.layouts]
        table = torch.zeros(len(found), max(len(f[0]) for f in found), dtype=torch.int32)
        for cell, (row, _, _) in enumerate(found):
            table[cell, : len(row)] = row + self.first(cell, layer)
        cold, hot = (torch.tensor([f[i] for f in found], dtype=torch.int32) for i in (1, 2))
        return table, cold, hot


@lru_cache(maxsize=1 << 14)
def entries(plan: TierPlan, start: int, new: int) -> tuple[Tensor, int, int]:
    """Table entries that tokens from `start` on see; how many are cold; tokens in hot ones."""
    at = schedule.boundary(plan, start)
    cold = [page.entry for page in schedule.cold_pages(plan, at)]
    hot_at = schedule.hot_start(plan, at)
    hot = range(hot_at // plan.page, -(-(start + new) // plan.page))
    row = torch.tensor([*cold, *hot], dtype=torch.int32)
    return row, len(cold), start + new - hot_at


def _native(layout: Layout) -> bool:
    """Whether the kernels know the score."""
    return layout.cell.score is None and layout.config.policy in native.SCORES


def _shape(move: Move) -> tuple[str, int, int]:
    return move.kind, len(move.src), len(move.dst)
