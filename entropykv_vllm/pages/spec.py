# SPDX-License-Identifier: Apache-2.0
"""The KV cache spec of a layer under eviction: vLLM groups layers, and sizes memory, by it."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec, KVCacheSpec, replace_as

from entropykv_vllm.plan.schedule import TierPlan, peak_pages

_FULL_ATTENTION_ONLY = ("sliding_window", "attention_chunk_size", "non_causal")


@dataclass(frozen=True)
class Origin:
    """Who made a spec, so that the scheduler can tell whether all workers evict as it does.

    Attributes:
        version: of this package.
        settings: a hash of the settings, defaults included.
        node: the worker's machine, for messages; specs of two machines are alike.
    """

    version: str
    settings: str
    node: str = field(compare=False)


@dataclass(frozen=True, kw_only=True)
class TierSpec(AttentionSpec):
    """Pages of one layer of a tier.

    Not a `FullAttentionSpec`: vLLM takes those for downward closed (each prefix of a prefix hit
    is a hit too), which compressed pages are not.
    """

    plan: TierPlan
    origin: Origin

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """The bytes of one layer at the peak of a request of the longest length."""
        return peak_pages(self.plan, vllm_config.model_config.max_model_len) * self.page_size_bytes

    def is_uniform_with_collection(self, kv_cache_specs: dict[str, KVCacheSpec]) -> bool:
        """Only layers of the same tier share a block table."""
        return all(spec == self for spec in kv_cache_specs.values())


def tier_spec(spec: FullAttentionSpec, plan: TierPlan, origin: Origin) -> TierSpec:
    """Turn vLLM's spec of a full-attention layer into that of a tier, of the same page size."""
    return replace_as(spec, TierSpec, drop=_FULL_ATTENTION_ONLY, plan=plan, origin=origin)


# Specs reach the engine process pickled, so its import of this module is the one moment that is
# sure to come before vLLM asks for their manager, whether or not plugins are loaded there.
import entropykv_vllm.pages.manager  # noqa: E402, F401
