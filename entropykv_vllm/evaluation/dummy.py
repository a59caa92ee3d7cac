# SPDX-License-Identifier: Apache-2.0
"""Models of random weights: a `config.json` is all there is, so nothing is downloaded.

What a KV cache weighs and what a step costs depend on the shape of a model, not on its weights.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from entropykv_vllm.evaluation import pool

DTYPE = "bfloat16"


def llama(
    *,
    layers: int,
    query_heads: int,
    kv_heads: int,
    head_size: int,
    hidden: int,
    mlp: int,
    vocabulary: int,
    positions: int,
) -> dict[str, Any]:
    """Return the `config.json` of a model of Llama's architecture."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": DTYPE,
        "num_hidden_layers": layers,
        "num_attention_heads": query_heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_size,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "vocab_size": vocabulary,
        "max_position_embeddings": positions,
        "tie_word_embeddings": True,
    }


def write(config: dict[str, Any], folder: Path) -> str:
    """Make the folder of a model; return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    return str(folder)


def cell(
    name: str,
    setting: tuple[str, dict[str, Any]],
    folder: str,
    config: dict[str, Any],
    tokens: int,
) -> dict[str, Any]:
    """Return what decides the result of a cell with such a model, besides its engine.

    Args:
        name: of the cell.
        setting: the policy and its eviction settings.
        folder: of the model.
        config: the model's.
        tokens: of a prompt.
    """
    policy, eviction = setting
    return {
        "name": name,
        "policy": policy,
        "eviction": eviction,
        "model": folder,
        "config": config,
        "tokens": tokens,
    }


def engine(
    folder: str, length: int, requests: int, room: int, more: dict[str, Any]
) -> dict[str, Any]:
    """Return the engine's arguments for such a model, whose pool holds `room` full tokens.

    It has no tokenizer: prompts are token ids.
    """
    return {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": DTYPE,
        "max_model_len": length,
        "max_num_seqs": requests,
        "kv_cache_memory_bytes": pool.pool_bytes(pool.shape(folder, DTYPE), room),
        **more,
    }


def prompts(count: int, tokens: int, vocabulary: int, seed: int = 0) -> list[list[int]]:
    """Return prompts of random tokens, so that no two share a prefix."""
    rng = random.Random(seed)
    return [[rng.randrange(3, vocabulary) for _ in range(tokens)] for _ in range(count)]
