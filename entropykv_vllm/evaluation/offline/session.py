# SPDX-License-Identifier: Apache-2.0
"""What comes after a text, read by several cells at once: one forward pass for all of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from entropykv_vllm.evaluation.offline.cell import Layout
from entropykv_vllm.evaluation.offline.model import Call, Model
from entropykv_vllm.evaluation.offline.pages import Pages
from entropykv_vllm.evaluation.offline.reading import Reading, sliding
from entropykv_vllm.plan.schedule import next_boundary


class Session:
    """Cells with one page size that go on from one reading."""

    def __init__(
        self,
        model: Model,
        reading: Reading,
        layouts: Sequence[Layout],
        dtype: torch.dtype,
        more: int,
    ) -> None:
        """`more` is how many tokens will follow the text."""
        self.model, self.reading = model, reading
        self.position = reading.tokens
        self.cells = len(layouts)
        self.pages = Pages(model, layouts, dtype, reading.tokens + more)
        self.pages.fill(reading, model.full)
        self._full = {layer: i for i, layer in enumerate(model.full)}
        self._recent: dict[int, tuple[Tensor, Tensor]] = {}
        self._intervals = {plan.interval for layout in layouts for plan in layout.plans}

    def read(self, ids: Tensor) -> Tensor:
        """Read tokens ``[cells, tokens]``; return outputs ``[cells, tokens, width]``.

        As in the scheduler, no step crosses a boundary, and pages are moved before a step.
        """
        parts, done = [], 0
        while done < ids.shape[1]:
            self.pages.free(self.reading, self.position)
            ends = [next_boundary(interval, self.position) for interval in self._intervals]
            step = min(ids.shape[1] - done, min(ends) - self.position)
            part = ids[:, done : done + step]
            parts.append(self.model.hidden(part, self.position, self._attend))
            self.position += step
            done += step
        return torch.cat(parts, 1)

    def _attend(self, call: Call) -> Tensor:
        if call.layer not in self._full:
            return self._slide(call)
        layer = self._full[call.layer]
        self.pages.write(layer, self.position, call.key, call.value)
        return self.pages.attend(layer, self.position, call)

    def _slide(self, call: Call) -> Tensor:
        assert call.window is not None
        if call.layer not in self._recent:
            rows = [x[-call.window :] for x in self.reading.rows[call.layer]]
            keys, values = (x.expand(self.cells, *x.shape) for x in rows)
        else:
            keys, values = self._recent[call.layer]
        keys, values = torch.cat([keys, call.key], 1), torch.cat([values, call.value], 1)
        self._recent[call.layer] = keys[:, -call.window :], values[:, -call.window :]
        return sliding(call.query, keys, values, call)
