# SPDX-License-Identifier: Apache-2.0
"""How many bytes a token, a page and a pool take."""

import json
from dataclasses import dataclass
from pathlib import Path

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class Shape:
    """What of a model decides the size of its KV cache."""

    layers: int
    kv_heads: int
    head_size: int
    item_bytes: int

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_size * self.item_bytes


def shape(model: str, dtype: str = "float32") -> Shape:
    """Read the shape from the `config.json` of a model's folder."""
    config = json.loads((Path(model) / "config.json").read_text())
    heads = config["num_attention_heads"]
    return Shape(
        layers=config["num_hidden_layers"],
        kv_heads=config.get("num_key_value_heads", heads),
        head_size=config.get("head_dim") or config["hidden_size"] // heads,
        item_bytes=ITEM_BYTES[dtype],
    )


def pool_bytes(shape: Shape, tokens: int, block_size: int = 128) -> int:
    """Return the bytes of a pool that holds `tokens` full tokens in pages of all layers.

    One page more than that, because vLLM keeps one as its null block.
    """
    pages = -(-tokens // block_size) + 1
    return pages * block_size * shape.token_bytes
