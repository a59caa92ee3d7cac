# SPDX-License-Identifier: Apache-2.0
"""A transformers model whose attention is a function of ours."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

NAME = "entropykv_offline"


@dataclass(frozen=True)
class Call:
    """One attention layer of one forward pass.

    `query` is float ``[batch, tokens, query_heads, head_size]``, `key` and `value` the same with
    KV heads; all new tokens, rotary embedding applied. `window` is that of a sliding-window layer.
    """

    layer: int
    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    window: int | None
    softcap: float


Attend = Callable[[Call], Tensor]

_attend: Attend | None = None


@contextmanager
def attending(attend: Attend):
    """Let `attend` be the attention of all forward passes; it returns the query's shape."""
    global _attend
    before, _attend = _attend, attend
    try:
        yield
    finally:
        _attend = before


def _interface(module, query, key, value, mask, scaling, **more) -> tuple[Tensor, None]:
    assert _attend is not None, "a model of `load` runs inside `attending` only"
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    window, softcap = more.get("sliding_window"), more.get("softcap") or 0.0
    return _attend(Call(module.layer_idx, query, key, value, scaling, window, softcap)), None


class Model:
    """A model in float32, its tokenizer, and which of its layers have full attention."""

    def __init__(self, folder: str) -> None:
        from transformers import (
            AttentionInterface,
            AttentionMaskInterface,
            AutoModelForCausalLM,
            AutoTokenizer,
        )
        from transformers.utils import logging

        logging.disable_progress_bar()  # that of loading weights, a few seconds
        AttentionInterface.register(NAME, _interface)
        AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)
        self.folder = folder
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.net: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation=NAME
        ).eval()
        config = self.net.config.get_text_config()
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * (
            config.num_hidden_layers
        )
        self.layers: int = config.num_hidden_layers
        self.full = [layer for layer, kind in enumerate(kinds) if kind == "full_attention"]
        self.heads: int = getattr(config, "num_key_value_heads", config.num_attention_heads)
        self.head_size: int = (
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )
        self.positions: int = config.max_position_embeddings

    @torch.inference_mode()
    def hidden(self, ids: Tensor, start: int, attend: Attend) -> Tensor:
        """The last layer's output ``[batch, tokens, width]`` of ids ``[batch, tokens]``.

        `start` is the position of the first of the tokens.
        """
        positions = torch.arange(start, start + ids.shape[1]).expand(ids.shape)
        with attending(attend):
            return self.net.base_model(
                input_ids=ids, position_ids=positions, use_cache=False
            ).last_hidden_state

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits ``[..., vocabulary]`` of outputs of `hidden`."""
        cap = getattr(self.net.config.get_text_config(), "final_logit_softcapping", None)
        logits = self.net.lm_head(hidden)
        return cap * torch.tanh(logits / cap) if cap else logits

    def frequencies(self) -> Tensor:
        """Radians a position of the rotary embedding of full layers, ``[head_size / 2]``."""
        rotary = self.net.base_model.rotary_emb
        found = getattr(rotary, "full_attention_inv_freq", None)
        return (rotary.inv_freq if found is None else found).float()

    def stops(self) -> set[int]:
        """The tokens that end an answer."""
        found = self.net.generation_config.eos_token_id
        return set(found) if isinstance(found, list) else {found, self.tokenizer.eos_token_id}
