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

_NOT_HERE = (
    "which is not computed offline: measure it through vLLM (entropykv eval --backend engine)"
)

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
    if more.get("s_aux") is not None:
        raise ValueError(f"this model has attention sinks, {_NOT_HERE}")
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    window, softcap = more.get("sliding_window"), more.get("softcap") or 0.0
    return _attend(Call(module.layer_idx, query, key, value, scaling, window, softcap)), None


def _plain(call: Call) -> Tensor:
    """Causal attention without windows."""
    from torch.nn.functional import scaled_dot_product_attention

    query, key, value = (x.transpose(1, 2) for x in (call.query, call.key, call.value))
    out = scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=call.scale, enable_gqa=True
    )
    return out.transpose(1, 2)


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
        self.layers: int = config.num_hidden_layers
        self.heads: int = getattr(config, "num_key_value_heads", config.num_attention_heads)
        self.head_size: int = (
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )
        self.positions: int = config.max_position_embeddings
        self.full = self._full_layers()

    @torch.inference_mode()
    def _full_layers(self) -> list[int]:
        """The layers without a sliding window, of a pass over a few tokens.

        Raises:
            ValueError: if all have one, or logits are not made as `logits` makes them.
        """
        calls: list[Call] = []

        def attend(call: Call) -> Tensor:
            calls.append(call)
            return _plain(call)

        ids = torch.arange(4)[None]
        with attending(attend):
            expected = self.net(input_ids=ids, use_cache=False).logits
        if not torch.allclose(self.logits(self.hidden(ids, 0, _plain)), expected, atol=1e-3):
            raise ValueError(f"this model changes its logits in a way of its own, {_NOT_HERE}")
        full = [call.layer for call in calls if call.window is None]
        if not full:
            raise ValueError("all layers of this model have sliding windows: nothing to evict from")
        return full

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
        config = self.net.config.get_text_config()
        logits = self.net.lm_head(hidden) * (getattr(config, "logit_scale", None) or 1.0)
        logits = logits / (getattr(config, "logits_scaling", None) or 1.0)
        cap = getattr(config, "final_logit_softcapping", None)
        return cap * torch.tanh(logits / cap) if cap else logits

    def frequencies(self) -> Tensor:
        """Radians a position of the rotary embedding of full layers, ``[head_size / 2]``."""
        rotary = self.net.base_model.rotary_emb
        found = getattr(rotary, "full_attention_inv_freq", None)
        return (rotary.inv_freq if found is None else found).float()

    def stops(self) -> set[int]:
        """The tokens that end an answer."""
        found = self.net.generation_config.eos_token_id
        several = found if isinstance(found, list) else [found, self.tokenizer.eos_token_id]
        return {token for token in several if token is not None}
