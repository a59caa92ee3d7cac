# SPDX-License-Identifier: Apache-2.0
"""Which attention backend a worker's layers get, by vLLM's platform."""

from __future__ import annotations

from vllm.config import VllmConfig
from vllm.v1.attention import selector
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

#: vLLM's name for layers whose tokens attend to all before them.
FULL = "full_attention"

#: The backends of vLLM that ours are made of, by the name that `--attention-backend` has for them.
GPU_BACKENDS = {"FLASH_ATTN": "FlashTierBackend", "TRITON_ATTN": "TritonTierBackend"}


def register(config: VllmConfig) -> None:
    """Have the model's layers ask for ours, in this process; before the model is made."""
    from vllm.platforms import current_platform

    if current_platform.is_cuda():
        register_backend(AttentionBackendEnum.CUSTOM, f"{_GPU}.{gpu_backend(config)}")
        config.attention_config.backend_per_kind[FULL] = AttentionBackendEnum.CUSTOM
    else:
        # vLLM has one for CPUs, whatever it is asked for.
        register_backend(AttentionBackendEnum.CPU_ATTN, _CPU)
    # vLLM remembers what it chose for an engine that was in this process before.
    selector._cached_get_attn_backend.cache_clear()


def gpu_backend(config: VllmConfig) -> str:
    """Ours that stands on what the user named, or else on FlashAttention where it runs."""
    from vllm.v1.attention.backends.fa_utils import is_flash_attn_varlen_func_available

    named = config.attention_config.backend
    if named is not None:
        return GPU_BACKENDS[named.name]
    flash = is_flash_attn_varlen_func_available() and _flash_runs(config)
    return GPU_BACKENDS["FLASH_ATTN" if flash else "TRITON_ATTN"]


def _flash_runs(config: VllmConfig) -> bool:
    """Whether FlashAttention knows the card, the pages, and the model's heads and numbers."""
    import torch
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend

    capability, model = current_platform.get_device_capability(), config.model_config
    return (
        capability is not None
        and FlashAttentionBackend.supports_compute_capability(capability)
        and FlashAttentionBackend.supports_head_size(model.get_head_size())
        # On Blackwell it has pages of 128 tokens only where heads have 256 numbers.
        and FlashAttentionBackend.supports_block_size(config.cache_config.block_size)
        and model.dtype in (torch.float16, torch.bfloat16)
    )


_GPU = "entropykv_vllm.attention.gpu"
_CPU = "entropykv_vllm.attention.cpu.EvictionCPUAttentionBackend"
