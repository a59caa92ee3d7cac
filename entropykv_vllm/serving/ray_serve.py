# SPDX-License-Identifier: Apache-2.0
"""Ray Serve: replicas that evict, behind one OpenAI endpoint."""

from __future__ import annotations

from typing import Any

from ray import serve
from ray.serve.llm import build_openai_app as stock_app
from ray.serve.llm.deployment import LLMServer

from entropykv_vllm.config.settings import load
from entropykv_vllm.serving import metrics
from entropykv_vllm.serving.ray_scaling import DEMAND
from entropykv_vllm.serving.settings import engine_settings

POLICY, SETTINGS = "kv_eviction", "kv_eviction_config"


class EvictionServer(LLMServer):
    """Ray's replica, which also tells Ray how many pages its requests ask for."""

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What `ray_scaling.PagesAskedFor` decides by; Ray calls it."""
        return {DEMAND: metrics.demand()}


def build_openai_app(arguments: dict[str, Any]) -> serve.Application:
    """Ray's builder of the same name, with eviction.

    Args:
        arguments: as Ray's; the `engine_kwargs` of a model written out here may have
            ``kv_eviction`` and ``kv_eviction_config``, with the values of `vllm serve`'s flags.

    Raises:
        ValueError: if the settings are wrong, in one sentence.
    """
    models = [
        with_eviction(model) if isinstance(model, dict) else model
        for model in arguments["llm_configs"]
    ]
    return stock_app({**arguments, "llm_configs": models})


def with_eviction(model: dict[str, Any]) -> dict[str, Any]:
    """One entry of `llm_configs` as Ray takes it.

    Raises:
        ValueError: if the settings are wrong, in one sentence.
    """
    engine = dict(model.get("engine_kwargs") or {})
    policy, settings = engine.pop(POLICY, "none"), engine.pop(SETTINGS, None)
    if policy == "none":
        if settings is not None:
            raise ValueError(f"{SETTINGS} needs {POLICY} beside it")
        return {**model, "engine_kwargs": engine}
    config = load(policy, settings)
    ours = engine_settings(config)
    if engine.get("block_size") is None:
        engine.pop("block_size", None)  # an empty value in YAML
    for name in ("worker_cls", "scheduler_cls"):
        if engine.pop(name, None) not in (None, "auto", ours[name]):
            raise ValueError(f"{POLICY} sets {name} itself: leave that out")
    others = {**ours.pop("additional_config"), **(engine.pop("additional_config", None) or {})}
    engine = {**ours, **engine, "additional_config": others}
    return {"server_cls": EvictionServer, **model, "engine_kwargs": engine}
