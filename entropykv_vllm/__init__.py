# SPDX-License-Identifier: Apache-2.0
"""EntropyKV for vLLM: long contexts in little KV-cache memory."""

from typing import Any

from entropykv_vllm.version import __version__

__all__ = ["__version__", "engine_args"]


def engine_args(policy: str = "entropykv", preset: str | None = None, **settings: Any) -> dict:
    """Arguments for `vllm.LLM` that turn eviction on.

    Args:
        policy: a name that ``--kv-eviction`` takes; ``none`` turns eviction off.
        preset: the preset that the settings are on top of, if not the policy's default.
        settings: any setting of ``--kv-eviction-config``, such as ``keep=0.5``.

    Raises:
        ValueError: if the settings are wrong, in one sentence.

    Example:
        ``LLM(model=..., **engine_args("entropykv", keep=0.5))``
    """
    from entropykv_vllm.config.settings import load
    from entropykv_vllm.serving.settings import engine_settings

    if policy == "none":
        return {}
    config = load(policy, {**({"preset": preset} if preset else {}), **settings})
    return engine_settings(config)
