# SPDX-License-Identifier: Apache-2.0
"""One text, read with the full cache: its keys and values, and who attended to what."""

from __future__ import annotations

import torch
from torch import Tensor

from entropykv_vllm.evaluation.offline.model import Call, Model
from entropykv_vllm.kernels import ops

PAGE = 128


class Reading:
    """The keys and values of a text, in hot pages of float32; all layers in one cache.

    Attributes:
        tokens: the length of the text.
        rows: for each layer, keys and values, float32 ``[tokens, heads, head_size]``.
        hidden: the last layer's output of the last token, ``[1, width]``.
    """

    def __init__(self, model: Model, ids: list[int]) -> None:
        self.tokens = len(ids)
        self.rows: list[tuple[Tensor, Tensor]] = []
        self._calls: list[Call] = []
        self._pages = -(-self.tokens // PAGE)
        self._masses: dict[tuple[int | None, int], Tensor] = {}
        shape = model.layers * self._pages, model.heads, PAGE, 2 * model.head_size
        self._cache = torch.zeros(shape)
        self._full = model.full
        hidden = model.hidden(torch.tensor([ids]), 0, self._attend)
        self.hidden = hidden[:, -1]

    def _table(self, layer: int) -> Tensor:
        first = layer * self._pages
        return torch.arange(first, first + self._pages, dtype=torch.int32)[None]

    def _attend(self, call: Call) -> Tensor:
        key, value = call.key[0], call.value[0]
        self.rows.append((key.contiguous(), value.contiguous()))
        self._calls.append(call)
        first = call.layer * self._pages * PAGE
        ops.write(key, value, self._cache, torch.arange(first, first + self.tokens))
        if call.window is not None and call.window < self.tokens:
            return sliding(call.query, call.key, call.value, call)
        query = call.query[0].contiguous()
        out = torch.empty_like(query)
        counts = [torch.tensor([n], dtype=torch.int32) for n in (0, self.tokens)]
        ops.attention(
            query,
            self._cache,
            out,
            torch.tensor([0, self.tokens], dtype=torch.int32),
            self._table(call.layer),
            *counts,
            16,
            call.scale,
            call.softcap,
            None,
        )
        return out[None]

    def mass(self, queries: int | None, at: int) -> Tensor:
        """The attention that tokens got from the last `queries` queries before a position.

        Args:
            queries: how many, or None for all.
            at: the position; after the end of the text it means the end.

        Returns:
            float32 ``[full layers, heads, at]``: sums over the queries of the probabilities,
            averaged over the query heads of a KV head.
        """
        at = min(at, self.tokens)
        if (queries, at) not in self._masses:
            layers = [self._observe(layer, queries or at, at) for layer in self._full]
            self._masses[queries, at] = torch.stack(layers)
        return self._masses[queries, at]

    def _observe(self, layer: int, queries: int, at: int) -> Tensor:
        call = self._calls[layer]
        query = call.query[0, at - min(queries, at) : at].contiguous()
        cache = self._cache[layer * self._pages : (layer + 1) * self._pages]
        mass = torch.zeros(self._pages, cache.shape[1], PAGE)
        ops.observe(
            query,
            cache,
            mass,
            torch.tensor([0, len(query)], dtype=torch.int32),
            self._table(0),
            *(torch.tensor([n], dtype=torch.int32) for n in (0, at)),
            16,
            call.scale,
            call.softcap,
            None,
            *(torch.tensor([n], dtype=torch.int32) for n in (0, 1)),
        )
        return mass.transpose(0, 1).flatten(1)[:, :at].clone()


def sliding(query: Tensor, keys: Tensor, values: Tensor, call: Call) -> Tensor:
    """Attention of a sliding-window layer.

    Args:
        query: ``[batch, new, query_heads, head_size]``, the last of the tokens.
        keys: ``[batch, tokens, heads, head_size]``, the last tokens up to the newest.
        values: the same.
        call: the layer's scale and window.

    Returns:
        The query's shape.
    """
    from torch.nn.functional import scaled_dot_product_attention

    new, tokens = query.shape[1], keys.shape[1]
    at = torch.arange(tokens)
    own = at[tokens - new :, None]
    assert call.window is not None
    visible = (at <= own) & (at > own - call.window)
    by_head = [x.transpose(1, 2) for x in (query, keys, values)]
    out = scaled_dot_product_attention(
        by_head[0],
        by_head[1],
        by_head[2],
        attn_mask=visible,
        scale=call.scale,
        enable_gqa=True,
    )
    return out.transpose(1, 2)
