# SPDX-License-Identifier: Apache-2.0
"""The attention backends of vLLM's GPU workers under eviction, for layers with full attention.

They are vLLM's own, which see tables without holes. Where cold pages have 16 bits nothing else
differs: cold pages are as hot ones, and FlashAttention (or vLLM's Triton kernel) runs unchanged.
Where they have fewer, our Triton kernels attend; new tokens are still stored by vLLM's. Layers with
sliding windows are other backends' matter (`serving.worker`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from entropykv_vllm.attention.split import hot_starts, split
from entropykv_vllm.kernels.gpu.attention import attention
from entropykv_vllm.kernels.gpu.attention_decode import SPLITS, Workspace, new_workspace
from entropykv_vllm.pages.spec import TierSpec

_INSTEAD = "choose another model, or turn eviction off with --kv-eviction none"


def _check(spec: TierSpec) -> None:
    if spec.block_size != spec.plan.page:
        raise ValueError(
            f"the attention kernel reads pages of {spec.block_size} tokens, and EntropyKV has them "
            f"of {spec.plan.page}: set --block-size {spec.block_size}"
        )
    if spec.plan.bits < 16 and (spec.head_size % 16 or spec.head_size > 256):
        raise ValueError(
            f"EntropyKV's kernels do not support head size {spec.head_size} in {spec.plan.bits} "
            f"bits: set bits to 16, {_INSTEAD}"
        )


@dataclass
class TierMetadata:
    """What a step's attention needs to know of the requests, for quantized layers of one tier."""

    num_actual_tokens: int
    max_query_len: int
    query_start_loc: Tensor
    table: Tensor
    cold: Tensor
    hot: Tensor
    bits: int
    workspace: Workspace


@lru_cache(maxsize=1)
def workspace(requests: int, heads: int, size: int, device: torch.device) -> Workspace:
    """What decoding needs beside the pages; one for all layers, which run one after another.

    The more requests a server may decode at once, the fewer splits of each: there are programs
    enough then.
    """
    room = ROOM // (4 * requests * heads * (size + 2))
    return new_workspace(requests, heads, size, device, max(1, min(SPLITS, room)))


#: Bytes of it, at most but for the least.
ROOM = 64 << 20


class TierBuilder:
    """Mixed into vLLM's builders: tables without holes, in tensors that stay where they are."""

    # vLLM would put a raw table into the metadata of another page group of the same tier.
    supports_update_block_table = False

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device, *args, **kwargs) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, *args, **kwargs)
        assert isinstance(kv_cache_spec, TierSpec)
        self.plan = kv_cache_spec.plan
        _check(kv_cache_spec)
        longest = vllm_config.model_config.max_model_len
        self.hot_starts = hot_starts(self.plan, longest, device)
        self.most_requests = vllm_config.scheduler_config.max_num_seqs
        self.kept: tuple[Tensor, Tensor, Tensor] | None = None
        if self.plan.bits < 16:
            sizes = self.most_requests, self.num_heads_q, kv_cache_spec.head_size
            self.workspace = workspace(*sizes, device)

    @classmethod
    def get_cudagraph_support(cls, vllm_config, kv_cache_spec) -> AttentionCGSupport:
        """What vLLM's kernels support; of ours, the one for decoding has a fixed shape."""
        if isinstance(kv_cache_spec, TierSpec) and kv_cache_spec.plan.bits < 16:
            return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
        return super().get_cudagraph_support(vllm_config, kv_cache_spec)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Any:
        step = common_attn_metadata
        table, cold, hot = self._split(step)
        if self.plan.bits == 16:
            held = cold.mul_(self.plan.page).add_(hot)
            whole = step.replace(block_table_tensor=table, seq_lens=held)
            return super().build(common_prefix_len, whole, fast_build)
        return TierMetadata(
            step.num_actual_tokens,
            step.max_query_len,
            step.query_start_loc,
            table,
            cold,
            hot,
            self.plan.bits,
            self.workspace,
        )

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> Any:
        """vLLM's shortens what it captures, which for our metadata nobody needs."""
        if self.plan.bits < 16:
            return self.build(0, common_attn_metadata)
        return super().build_for_cudagraph_capture(common_attn_metadata)

    def _split(self, step: CommonAttentionMetadata) -> tuple[Tensor, Tensor, Tensor]:
        queries = step.query_start_loc.diff()
        rows = step.block_table_tensor, step.seq_lens, queries
        return self._keep(*split(self.plan, self.hot_starts, *rows))

    def _keep(self, *found: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Copies in tensors of this builder's own: a CUDA graph reads where it was captured."""
        if self.kept is None:
            # As many as the workspace has room for: more would be an error here, not behind it.
            self.kept = tuple(x.new_zeros(self.most_requests, *x.shape[1:]) for x in found)
        assert self.kept is not None
        table, cold, hot = (
            kept[: len(x)].copy_(x) for kept, x in zip(self.kept, found, strict=True)
        )
        return table, cold, hot


class TierImpl:
    """Mixed into vLLM's implementations: our kernels where pages are quantized."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        if self.alibi_slopes is not None:
            raise ValueError(f"EntropyKV does not support attention with ALiBi: {_INSTEAD}")

    def fused_output_quant_supported(self, quant_key: object) -> bool:
        """vLLM's Triton kernel can, ours cannot: which one runs is not known when vLLM asks."""
        return False

    def forward(
        self,
        layer: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        *args,
        **kwargs,
    ) -> Tensor:
        step = attn_metadata
        if not isinstance(step, TierMetadata):
            inputs = query, key, value, kv_cache, step, output
            return super().forward(layer, *inputs, *args, **kwargs)
        tokens = step.num_actual_tokens
        attention(
            query[:tokens],
            kv_cache,
            output[:tokens],
            step.query_start_loc,
            step.table,
            step.cold,
            step.hot,
            step.bits,
            self.scale,
            self.logits_soft_cap,
            None if self.sinks is None else self.sinks.float(),
            longest=step.max_query_len,
            workspace=step.workspace,
        )
        return output


class TierBackend:
    """Mixed into vLLM's backends: 16-bit caches, the numbers of a head side by side."""

    supported_kv_cache_dtypes: ClassVar = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return KVCacheLayout.LBHNC, KVCacheLayout.BLHNC


class FlashTierBuilder(TierBuilder, FlashAttentionMetadataBuilder):
    """Tables without holes for FlashAttention."""


class FlashTierImpl(TierImpl, FlashAttentionImpl):
    """FlashAttention, and our kernels where pages are quantized."""


class FlashTierBackend(TierBackend, FlashAttentionBackend):
    """FlashAttention under eviction."""

    @classmethod
    def validate_configuration(cls, *args, **kwargs) -> list[str]:
        """vLLM's; what some layers need, such as sinks, is known only once they are made."""
        reasons = super().validate_configuration(*args, **kwargs)
        if reasons and not TritonTierBackend.validate_configuration(*args, **kwargs):
            reasons.append("name TRITON_ATTN with --attention-backend")
        return reasons

    @staticmethod
    def get_impl_cls() -> type[FlashTierImpl]:
        return FlashTierImpl

    @staticmethod
    def get_builder_cls() -> type[FlashTierBuilder]:
        return FlashTierBuilder


class TritonTierBuilder(TierBuilder, TritonAttentionMetadataBuilder):
    """Tables without holes for vLLM's Triton kernel."""


class TritonTierImpl(TierImpl, TritonAttentionImpl):
    """vLLM's Triton kernel, and ours where pages are quantized."""


class TritonTierBackend(TierBackend, TritonAttentionBackend):
    """vLLM's Triton backend under eviction: for cards and models without FlashAttention."""

    @staticmethod
    def get_impl_cls() -> type[TritonTierImpl]:
        return TritonTierImpl

    @staticmethod
    def get_builder_cls() -> type[TritonTierBuilder]:
        return TritonTierBuilder
