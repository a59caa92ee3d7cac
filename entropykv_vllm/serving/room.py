# SPDX-License-Identifier: Apache-2.0
"""Whether a request that asks for more than the server's settings can ever fit into the pool.

The start-up check holds for the longest request under the server's settings. One that is not to be
evicted takes more, and would wait for ever, and all behind it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from vllm.config import VllmConfig

from entropykv_vllm.plan.model_shape import ModelShape, read_shape
from entropykv_vllm.plan.pool import Evicted, Pool, eviction_pool
from entropykv_vllm.plan.request import AS_SERVED, Control, request_plan
from entropykv_vllm.serving.checks import model_heads
from entropykv_vllm.serving.settings import settings_of


def check_room(config: VllmConfig, control: Control, tokens: int) -> None:
    """Refuse a prompt that fits under the server's settings only.

    Args:
        config: vLLM's, of a server that has started.
        control: what the request asks for.
        tokens: of the prompt.

    Raises:
        ValueError: in words.
    """
    usable = _usable(config)
    if control == AS_SERVED or usable < 1 or (pool := _pool_of(config)) is None:
        return
    need = controlled(pool, control).peak(tokens + 1)
    if need > usable:
        raise ValueError(
            f"this prompt of {tokens} tokens would take {need} pages in the way it asks for, and "
            f"the server has {usable}: leave kv_eviction, kv_keep and kv_protect out, or ask for "
            "less"
        )


def controlled(pool: Pool, control: Control) -> Pool:
    """The pool as a request that asks for something sees it."""
    tables = tuple(
        Evicted(request_plan(table.plan, control)) if isinstance(table, Evicted) else table
        for table in pool.tables
    )
    return replace(pool, tables=tables)


def _usable(config: VllmConfig) -> int:
    """The pages that a request may have, as the scheduler counts them.

    vLLM adds up those of all engines of a server, and lets none in on those of its watermark.
    """
    engines = max(1, config.parallel_config.data_parallel_size)
    pages = (config.cache_config.num_gpu_blocks or 0) // engines
    return pages - 1 - int(config.scheduler_config.watermark * pages)


@lru_cache(maxsize=4)
def _pool(shape: ModelShape, settings, page: int, item: int, step: int) -> Pool:
    return eviction_pool(shape, settings, page, item, step)


def _pool_of(config: VllmConfig) -> Pool | None:
    """The server's pool, if its model is of a kind whose pages can be counted from outside.

    Of others the scheduler notices that a request does not fit (`serving.scheduler`).
    """
    try:
        shape = read_shape(config.model_config.hf_config.to_dict())
        item = model_heads(config)[1].itemsize
        page, step = config.cache_config.block_size, config.scheduler_config.max_num_batched_tokens
        return _pool(shape, settings_of(config), page, item, step)
    except ValueError:
        return None
