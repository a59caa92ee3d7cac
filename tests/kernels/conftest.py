# SPDX-License-Identifier: Apache-2.0
"""vLLM's own CPU kernels, and plain attention to compare them with."""

import pytest
import torch


class CpuKernels:
    """vLLM's CPU attention ops on one layer's cache ``[blocks, heads, page, 2 * dim]``."""

    def __init__(self, ops):
        self.ops = ops

    @staticmethod
    def _regions(cache):
        blocks, heads, page, width = cache.shape
        return cache.view(blocks, heads, 2 * page, width // 2).chunk(2, dim=2)

    def write(self, cache, keys, values, slots, isa):
        """Store keys and values ``[tokens, heads, dim]`` at ``slots``."""
        self.ops.cpu_attn_reshape_and_cache(keys, values, *self._regions(cache), slots, isa)

    def attend(self, query, cache, table, seq_lens, query_lens, isa, scale):
        """Causal attention of ``query`` ``[tokens, heads, dim]``, the last of each sequence."""
        starts = torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        plan = self.ops.cpu_attn_get_scheduler_metadata(
            num_reqs=len(query_lens),
            num_heads=query.shape[1],
            num_kv_heads=cache.shape[1],
            head_dim=query.shape[2],
            seq_lens=seq_lens,
            dtype=query.dtype,
            query_start_loc=starts,
            causal=True,
            sliding_window_size=-1,
            isa=isa,
            enable_kv_split=True,
        )
        output = torch.empty_like(query)
        self.ops.cpu_attention_with_kv_cache(
            query=query,
            key_cache=self._regions(cache)[0],
            value_cache=self._regions(cache)[1],
            output=output,
            query_start_loc=starts,
            seq_lens=seq_lens,
            scale=scale,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=table,
            softcap=0.0,
            scheduler_metadata=plan,
            s_aux=None,
        )
        return output


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Small tensors gain nothing from threads, and lose much where other processes run."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def cpu_kernels():
    """vLLM's ops; the test is skipped where vLLM is not built for the CPU."""
    pytest.importorskip("vllm")
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip("vLLM is not a CPU build")
    current_platform.import_kernels()
    from vllm import _custom_ops

    return CpuKernels(_custom_ops)


@pytest.fixture(scope="session")
def plain_attention():
    """Attention of one request in float32, without pages."""

    def attend(query, keys, values, scale):
        """``query`` ``[q, heads, dim]`` over ``[kv_heads, tokens, dim]``, causal at the end."""
        group = query.shape[1] // keys.shape[0]
        keys, values = (x.float().repeat_interleave(group, 0) for x in (keys, values))
        logits = torch.einsum("qhd,htd->hqt", query.float(), keys) * scale
        new, tokens = logits.shape[1:]
        future = torch.arange(tokens) > torch.arange(tokens - new, tokens)[:, None]
        weights = logits.masked_fill(future, -torch.inf).softmax(-1)
        return torch.einsum("hqt,htd->qhd", weights, values)

    return attend
