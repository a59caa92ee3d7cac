# SPDX-License-Identifier: Apache-2.0
"""What cannot be served is refused at start-up, in one sentence that says what to do."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from vllm import envs
from vllm.config import VllmConfig
from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)

from entropykv_vllm.attention import backends
from entropykv_vllm.config.profile import fingerprint
from entropykv_vllm.kernels.scores import OBSERVED
from entropykv_vllm.pages.spec import Origin, TierSpec
from entropykv_vllm.plan.capacity import capacity
from entropykv_vllm.plan.tiers import Tier, make_tiers
from entropykv_vllm.serving import positions
from entropykv_vllm.serving.origin import origin_of
from entropykv_vllm.serving.settings import settings_of
from entropykv_vllm.version import SUPPORTED_VLLM, fits

_OFF = "or turn eviction off with --kv-eviction none"


class UnsupportedError(ValueError):
    """A model, flag or vLLM version that cannot be served with eviction."""


def check_version(version: str) -> None:
    """Refuse a vLLM whose internals are not known to fit."""
    if not fits(version):
        raise UnsupportedError(
            f"EntropyKV supports vLLM {' and '.join(SUPPORTED_VLLM)}, and this is {version}: "
            f"install a supported vLLM, {_OFF}"
        )


def check_engine(config: VllmConfig) -> None:
    """Refuse models and flags that eviction does not support.

    Raises:
        UnsupportedError: one sentence that says what and what to do.
    """
    for refused, sentence in _refusals(config):
        if refused:
            raise UnsupportedError(f"EntropyKV {sentence}, {_OFF}")


def _refusals(config: VllmConfig) -> list[tuple[bool, str]]:
    from vllm.platforms import current_platform

    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    return [
        (
            not (current_platform.is_cpu() or current_platform.is_cuda()),
            "runs on CPUs and on CUDA GPUs only: use a build of vLLM for one of them",
        ),
        (model.use_mla, "does not support models with multi-head latent attention: choose another"),
        (model.is_encoder_decoder, "does not support encoder-decoder models: choose another"),
        (model.runner_type == "pooling", "does not support pooling models: serve a generative one"),
        (
            model.is_diffusion,
            "does not support diffusion models, which write tokens anew: choose another",
        ),
        (
            model.is_mm_prefix_lm,
            "does not support images that attend to what follows in them: leave them out with "
            "--language-model-only",
        ),
        (
            config.speculative_config is not None,
            "does not support speculative decoding: leave --speculative-config out",
        ),
        (
            cache.cache_dtype not in ("auto", "float16", "bfloat16"),
            f"does not support --kv-cache-dtype {cache.cache_dtype}, which a checkpoint may ask "
            "for: set it to bfloat16 or float16",
        ),
        (
            cache.kv_sharing_fast_prefill,
            "does not support --kv-sharing-fast-prefill: leave it out",
        ),
        (
            config.kv_transfer_config is not None,
            "does not support KV connectors: leave --kv-transfer-config out",
        ),
        (
            parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1,
            "does not support context parallelism: leave it out",
        ),
        (
            settings_of(config).policy in OBSERVED and cache.enable_prefix_caching,
            "needs --no-enable-prefix-caching for scores that read attention, since requests with "
            "the same prefix look at it differently: set that, choose an attention-free policy",
        ),
        (
            settings_of(config).policy in OBSERVED and positions.wanted(config),
            "shows no text with scores that read attention: leave out --kv-eviction-ui-text",
        ),
        (
            current_platform.is_cpu() and config.use_v2_model_runner,
            "cannot run vLLM's V2 model runner on CPUs: set VLLM_USE_V2_MODEL_RUNNER=0",
        ),
        (
            current_platform.is_cpu() and parallel.use_ray and _older_ray_executor(),
            "runs vLLM's older executor on Ray on GPUs only: leave out "
            "VLLM_USE_RAY_V2_EXECUTOR_BACKEND=0",
        ),
        (
            config.scheduler_config.disable_hybrid_kv_cache_manager is True,
            "needs vLLM's hybrid KV cache manager: leave out --disable-hybrid-kv-cache-manager",
        ),
        *(_gpu_refusals(config) if current_platform.is_cuda() else []),
    ]


def _older_ray_executor() -> bool:
    """Is it the one whose workers talk through GPUs, as they do unless told otherwise?"""
    newer, channel = envs.VLLM_USE_RAY_V2_EXECUTOR_BACKEND, "VLLM_USE_RAY_COMPILED_DAG_CHANNEL_TYPE"
    return not newer and getattr(envs, channel) != "shm"


def _gpu_refusals(config: VllmConfig) -> list[tuple[bool, str]]:
    attention, names = config.attention_config, " or ".join(backends.GPU_BACKENDS)
    named = attention.backend
    policy = settings_of(config).policy
    return [
        (
            named is not None and named.name not in backends.GPU_BACKENDS,
            f"attends with {names}: name one of them with --attention-backend, or none",
        ),
        (
            backends.FULL in attention.backend_per_kind,
            f"brings the backend for layers with full attention: name {names} with "
            "--attention-backend, and other kinds of layers in backend_per_kind",
        ),
        (
            policy in OBSERVED,
            f"has the policy {policy}, which reads attention, on CPUs only: choose another",
        ),
        (
            positions.wanted(config),
            "follows the tokens of a text on CPUs only: leave out --kv-eviction-ui-text",
        ),
    ]


def is_full_attention(spec: KVCacheSpec) -> bool:
    """Whether a layer's pages are ours to evict."""
    return type(spec) is FullAttentionSpec


def check_layers(config: VllmConfig, specs: dict[str, KVCacheSpec]) -> None:
    """Refuse layers that neither we nor vLLM's own managers can hold beside ours."""
    for name, spec in specs.items():
        known = is_full_attention(spec) or isinstance(spec, SlidingWindowSpec | MambaSpec)
        if not known:
            raise UnsupportedError(
                f"EntropyKV does not support the {type(spec).__name__} of layer {name}: "
                f"choose another model, {_OFF}"
            )
        if is_full_attention(spec):
            _check_full_attention(config, name, spec)
        elif isinstance(spec, SlidingWindowSpec):
            _check_sliding_window(config, name, spec)


def _check_sliding_window(config: VllmConfig, name: str, spec: AttentionSpec) -> None:
    """vLLM 0.32 for CPUs takes a cache of another dtype for one of the model's."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu() and spec.dtype != config.model_config.dtype:
        raise UnsupportedError(
            f"vLLM's kernels for CPUs, which layer {name} has, read a cache of the model's "
            f"dtype only: leave --kv-cache-dtype out, {_OFF}"
        )


def _check_full_attention(config: VllmConfig, name: str, spec: AttentionSpec) -> None:
    if spec.non_causal or spec.sliding_window or spec.attention_chunk_size:
        raise UnsupportedError(
            f"EntropyKV needs plain causal attention, which layer {name} has not: "
            f"choose another model, {_OFF}"
        )
    backend = config.compilation_config.static_forward_context[name].get_attn_backend()
    if not backend.__module__.startswith("entropykv_vllm."):
        raise UnsupportedError(
            f"EntropyKV cannot serve layer {name}, for which the model or another plugin chose "
            f"{backend.__name__}: name only 'entropykv' in VLLM_PLUGINS, choose another model, "
            f"{_OFF}"
        )


def full_attention_layers(config: VllmConfig, specs: dict[str, KVCacheSpec]) -> list[int]:
    """The full-attention layers of the whole model, also those of other pipeline stages."""
    from vllm.model_executor.models.utils import extract_layer_index

    here = {extract_layer_index(name) for name, spec in specs.items() if is_full_attention(spec)}
    if config.parallel_config.pipeline_parallel_size == 1:
        return sorted(here)
    everywhere = declared_layers(config)
    if not here <= set(everywhere):
        raise UnsupportedError(
            "EntropyKV cannot tell which layers of this model have full attention on other "
            f"pipeline stages: serve it with --pipeline-parallel-size 1, {_OFF}"
        )
    return everywhere


def declared_layers(config: VllmConfig) -> list[int]:
    """The full-attention layers that the model's own configuration names."""
    text = config.model_config.hf_text_config
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
    # The last ones may read the pages of earlier layers, and have none.
    shared = getattr(text, "num_kv_shared_layers", None) or 0
    own = kinds[: len(kinds) - shared]
    return [layer for layer, kind in enumerate(own) if kind == "full_attention"]


def tiers_of(
    config: VllmConfig, layers: Sequence[int], head_size: int, dtype: torch.dtype
) -> tuple[Tier, ...]:
    """The tiers of a server whose cache has heads of this size and dtype.

    Raises:
        ValueError: if the settings do not fit, in words.
    """
    page = config.cache_config.block_size
    fits = partial(capacity, head_size, page, dtype.itemsize)
    return make_tiers(settings_of(config), layers, page, fits)


def model_heads(config: VllmConfig) -> tuple[int, torch.dtype]:
    """The size and dtype of the cache's heads, as the model's configuration says."""
    model = config.model_config
    return model.get_head_size(), kv_cache_dtype_str_to_dtype(
        config.cache_config.cache_dtype, model
    )


def layer_heads(config: VllmConfig, specs: dict[str, KVCacheSpec]) -> tuple[int, torch.dtype]:
    """The size and dtype of the heads of this worker's full-attention layers.

    Raises:
        UnsupportedError: if they differ and old pages are to be quantized.
    """
    full = [spec for spec in specs.values() if is_full_attention(spec)]
    heads = {(size, spec.dtype) for spec in full for size in (spec.head_size, spec.head_size_v)}
    if len(heads) > 1 and min(settings_of(config).bits_used) < 16:
        raise UnsupportedError(
            "EntropyKV quantizes old pages only where all full-attention layers have the same "
            f"head size and dtype, which this model's have not: set bits to 16, {_OFF}"
        )
    return (full[0].head_size, full[0].dtype) if full else model_heads(config)


def check_plan(config: VllmConfig) -> None:
    """Refuse settings that do not fit the model or the page size, before a worker is started.

    Raises:
        UnsupportedError: one sentence that says what and what to do.
    """
    _check_profile(config)
    try:
        tiers_of(config, declared_layers(config), *model_heads(config))
    except ValueError as error:
        raise UnsupportedError(f"these settings do not fit: {error}") from None


def _check_profile(config: VllmConfig) -> None:
    profile = settings_of(config).profile
    if profile and profile.model != fingerprint(config.model_config.hf_text_config):
        raise UnsupportedError(
            f"these settings were calibrated for another model ({profile.name or profile.model}): "
            "calibrate this one with 'entropykv calibrate', or leave the profile out"
        )


def check_groups(config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Refuse to schedule for workers that do not evict, or that evict in another way.

    Raises:
        UnsupportedError: if a worker reported a full-attention layer without a tier, or a tier
            that another version of this package made, or other settings.
    """
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    if any(is_full_attention(spec) for spec in specs) or not any(
        isinstance(spec, TierSpec) for spec in specs
    ):
        raise UnsupportedError(
            "a worker does not run EntropyKV, so it would keep full caches: "
            f"install the same entropykv-vllm on every node, {_OFF}"
        )
    ours = origin_of(settings_of(config))
    for theirs in (spec.origin for spec in specs if isinstance(spec, TierSpec)):
        if theirs != ours:
            raise UnsupportedError(_differs(theirs, ours))


def _differs(theirs: Origin, ours: Origin) -> str:
    if theirs.version != ours.version:
        what = f"runs EntropyKV {theirs.version}, and this server {ours.version}"
        return f"the worker on {theirs.node} {what}: install the same entropykv-vllm on every node"
    return (
        f"the worker on {theirs.node} evicts with other settings than this server: "
        "give every node the same --kv-eviction and --kv-eviction-config"
    )
