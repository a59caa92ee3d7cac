# SPDX-License-Identifier: Apache-2.0
"""The engine of a cell: stock vLLM or one policy, everything else alike."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from entropykv_vllm.config.settings import EvictionConfig, load
from entropykv_vllm.errors import UsageError
from entropykv_vllm.evaluation import pool

PAGE = 32
WINDOW = 256
POLICIES = ("entropykv", "norm", "knorm", "keydiff", "sink", "window", "random")
# Of these nothing old survives, so their window is their whole memory.
WINDOW_ONLY = ("sink", "window")

# What a cell's settings are on top of if they name no preset, so that tables keep their meaning.
BASE = {"bits": 16, "keep": 0.5, "window": WINDOW, "interval": 512}


def model_folder(model: str) -> str:
    """Return the folder of a model; those that `entropykv model fetch` knows may be named."""
    from entropykv_vllm.model.fetch import fetch_model
    from entropykv_vllm.model.sources import SOURCES

    return str(fetch_model(quiet=True, name=model)) if model in SOURCES else model


def max_positions(model: str) -> int:
    """Return the longest context, in tokens, that a model's `config.json` allows."""
    config = json.loads((Path(model_folder(model)) / "config.json").read_text())
    return int(config["max_position_embeddings"])


def load_tokenizer(model: str) -> Any:
    """Return the tokenizer of a model.

    Raises:
        UsageError: one sentence that says why there is none.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model_folder(model))
    except (OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        raise UsageError(f"'{model}' is not a folder with a tokenizer: {reason}") from None


def check_length(model: str, tokens: int, more: int, what: str) -> None:
    """Refuse what is no model, and prompts that are too long for it with what follows them.

    Raises:
        UsageError: one sentence that says what is wrong.
    """
    try:
        longest = max_positions(model)
        pool.shape(model_folder(model))
    except KeyError as error:
        raise UsageError(
            f"the config.json of '{model}' has no {error.args[0]}: models with other names for it, "
            "such as GPT-2, or for text as a part of theirs, are not evaluated"
        ) from None
    except (OSError, ValueError, TypeError, ZeroDivisionError) as error:
        raise UsageError(f"'{model}' is not a folder of a language model: {error!r}") from None
    if tokens + more > longest:
        raise UsageError(f"{tokens} tokens are too many: this model reads {longest} with {what}")


def eviction(policy: str, keep: float, tokens: int, config: dict[str, Any]) -> dict[str, Any]:
    """Return the eviction settings of a cell, such that policies of one `keep` use equal memory.

    Others hold the window and a share of what is older; window policies get a window as long as
    both, and segments of a 16-bit page, as nothing of a segment survives there anyway.
    """
    settings = {"window": WINDOW, **config, "keep": keep}
    if policy in WINDOW_ONLY:
        window = settings["window"]
        settings["window"] = window + round(keep * (tokens - window))
        settings["segment"] = PAGE
        settings.pop("bits", None)
    return settings


def settings(policy: str, eviction: Mapping[str, Any]) -> EvictionConfig:
    """Return the validated settings of a cell.

    Raises:
        ValueError: if they are wrong, in one sentence.
    """
    base = {} if "preset" in eviction else BASE
    return load(policy, {**base, **eviction})


def policy_arguments(spec: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of vLLM's engine that make a cell's policy."""
    import entropykv_vllm

    base = {} if "preset" in spec["eviction"] else BASE
    return entropykv_vllm.engine_args(spec["policy"], **{**base, **spec["eviction"]})


def make(spec: dict[str, Any]) -> Any:
    """Start the engine of a cell. `spec["engine"]` are its arguments besides the policy's."""
    from vllm import LLM

    arguments = {
        "dtype": "float32",
        "enable_prefix_caching": False,
        "disable_log_stats": False,  # the gauges that `drive` reads
        "seed": 0,
        **spec["engine"],
    }
    return LLM(model=model_folder(spec["model"]), **{**arguments, **policy_arguments(spec)})
