# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU attention, reading the pages that are left: its kernel runs unchanged."""

from __future__ import annotations

from dataclasses import replace

from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from entropykv_vllm.attention.compact import compact


class CompactingMetadataBuilder(CPUAttentionMetadataBuilder):
    """Drops the holes of each table row, and their tokens from its length.

    The order of the pages does not matter to attention, and each page but the last is full; so
    the compacted row is a valid paged context. New tokens are still written at their natural
    positions, since the slot mapping is left alone.
    """

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> CPUAttentionMetadata:
        table, seq_lens = compact(
            common_attn_metadata.block_table_tensor, common_attn_metadata.seq_lens, self.block_size
        )
        if table is not common_attn_metadata.block_table_tensor:
            common_attn_metadata = replace(
                common_attn_metadata,
                block_table_tensor=table,
                seq_lens=seq_lens,
                max_seq_len=int(seq_lens.max()),
            )
        return super().build(common_prefix_len, common_attn_metadata, fast_build)


class EvictionCPUAttentionBackend(CPUAttentionBackend):
    """Registered in place of vLLM's CPU backend, in workers under eviction only."""

    @staticmethod
    def get_builder_cls() -> type[CompactingMetadataBuilder]:
        return CompactingMetadataBuilder
