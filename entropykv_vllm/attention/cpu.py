# SPDX-License-Identifier: Apache-2.0
"""The attention backend of vLLM's CPU workers under eviction.

Layers of a tier read and write pages with our ops; others (sliding windows) stay with vLLM's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backend import AttentionType, CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from entropykv_vllm.attention import masses
from entropykv_vllm.attention.masses import Observed, observed
from entropykv_vllm.attention.split import hot_starts, split
from entropykv_vllm.kernels import ops
from entropykv_vllm.pages.spec import TierSpec
from entropykv_vllm.serving.settings import evicts, settings_of


@dataclass
class TierMetadata:
    """What a step's attention needs to know of the requests, for the layers of one tier."""

    num_actual_tokens: int
    query_start_loc: Tensor
    table: Tensor
    cold: Tensor
    hot: Tensor
    bits: int
    slot_mapping: Tensor
    observed: Observed | None


class TierMetadataBuilder(CPUAttentionMetadataBuilder):
    """Builds a tier's metadata; for other layers, vLLM's."""

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        if isinstance(kv_cache_spec, TierSpec):
            longest = vllm_config.model_config.max_model_len
            self.hot_starts = hot_starts(kv_cache_spec.plan, longest)
            self.policy = settings_of(vllm_config).policy

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> TierMetadata | CPUAttentionMetadata:
        if not isinstance(self.kv_cache_spec, TierSpec):
            return super().build(common_prefix_len, common_attn_metadata, fast_build)
        step, plan = common_attn_metadata, self.kv_cache_spec.plan
        starts = step.query_start_loc
        queries = starts.diff()
        # vLLM's rows have room for the longest request that may come, which may be far longer.
        longest = -(-step.max_seq_len // plan.page)
        rows = step.block_table_tensor[:, :longest], step.seq_lens, queries
        table, cold, hot = split(plan, self.hot_starts, *rows)
        return TierMetadata(
            step.num_actual_tokens,
            starts,
            table,
            cold,
            hot,
            plan.bits,
            step.slot_mapping,
            observed(plan, self.policy, step.seq_lens, queries),
        )


class TierAttentionImpl(CPUAttentionBackendImpl):
    """Attention of a layer; with our ops where its pages are a tier's."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        # The backend stays registered when an engine of the same process comes that does not evict.
        full = self.sliding_window == -1 and self.attn_type == AttentionType.DECODER
        self.ours = full and evicts(get_current_vllm_config())
        if self.ours:
            self._refuse_what_is_missing()

    def _refuse_what_is_missing(self) -> None:
        wrong = {
            "attention with ALiBi": self.alibi_slopes is not None,
            f"head size {self.head_size}": self.head_size % 16 != 0 or self.head_size > 256,
            f"{self.num_queries_per_kv} query heads for each KV head": self.num_queries_per_kv > 64,
        }
        for name, found in wrong.items():
            if found:
                raise ValueError(
                    f"EntropyKV's kernels do not support {name}: choose another model, or turn "
                    "eviction off with --kv-eviction none"
                )

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping) -> None:
        if not self.ours:
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
            return
        ops.write(key, value, kv_cache, slot_mapping)
        if (mass := masses.of(layer)) is not None:
            masses.forget(mass, slot_mapping, kv_cache.shape[2])

    def forward(
        self, layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs
    ) -> Tensor:
        if not isinstance(attn_metadata, TierMetadata):
            return super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs
            )
        tokens = attn_metadata.num_actual_tokens
        rest = (
            attn_metadata.query_start_loc,
            attn_metadata.table,
            attn_metadata.cold,
            attn_metadata.hot,
            attn_metadata.bits,
            self.scale,
            self.logits_soft_cap,
            None if self.sinks is None else self.sinks.float(),
        )
        ops.attention(query[:tokens], kv_cache, output[:tokens], *rest)
        mass, seen = masses.of(layer), attn_metadata.observed
        if mass is not None and seen is not None:
            ops.observe(query[:tokens], kv_cache, mass, *rest, seen.first, seen.fresh)
        return output


class EvictionCPUAttentionBackend(CPUAttentionBackend):
    """Registered in place of vLLM's CPU backend, in workers under eviction only."""

    supported_kv_cache_dtypes: ClassVar = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_impl_cls() -> type[TierAttentionImpl]:
        return TierAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[TierMetadataBuilder]:
        return TierMetadataBuilder
