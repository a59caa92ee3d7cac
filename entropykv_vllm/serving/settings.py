# SPDX-License-Identifier: Apache-2.0
"""The settings, as they travel inside vLLM's configuration to every process."""

from __future__ import annotations

from typing import Any

from entropykv_vllm.config.settings import CONFIG_KEY, EvictionConfig

#: A worker looks at its own machine: that of the server may have no GPU.
WORKER = "entropykv_vllm.serving.worker.EvictionWorker"
SCHEDULER = "entropykv_vllm.serving.scheduler.scheduler"


def evicts(vllm_config) -> bool:
    """Whether an engine evicts; in a process there may be one that does and one that does not."""
    return CONFIG_KEY in (vllm_config.additional_config or {})


def settings_of(vllm_config) -> EvictionConfig:
    """The validated settings that a server runs with."""
    return EvictionConfig.model_validate(vllm_config.additional_config[CONFIG_KEY])


def page_size(config: EvictionConfig) -> int:
    """Tokens per page unless --block-size is given.

    Small pages follow the keep ratio closely; those of 8 bits hold too few whole tiles if small.
    """
    return 64 if 8 in config.bits_used else 32


def engine_settings(config: EvictionConfig) -> dict[str, Any]:
    """vLLM engine arguments that turn eviction on."""
    from entropykv_vllm.kernels.scores import OBSERVED  # torch: `entropykv plan` does without

    return {
        **({"enable_prefix_caching": False} if config.policy in OBSERVED else {}),
        "additional_config": {CONFIG_KEY: config.model_dump(mode="json", exclude_none=True)},
        "worker_cls": WORKER,
        "scheduler_cls": SCHEDULER,
        "block_size": page_size(config),
    }
