# SPDX-License-Identifier: Apache-2.0
"""A small model with random weights in an engine in which everything is looked at after each step.

The engine runs in debug mode, so it checks itself who owns each page, and that no page changes
unasked. Here is beside that: the worker's rows are the scheduler's tables, and pages that nobody
owns may be made poisonous, so that whoever reads one is found out by its answer.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

from entropykv_vllm import engine_args
from entropykv_vllm.plan.schedule import peak_pages
from entropykv_vllm.serving.checksums import _handed_out
from entropykv_vllm.serving.scheduler import MOVES

from .conftest import Engine

MAX_LEN = 1024
POOL = 1 << 23

#: Two tiers share a pool, each with its own share, and pages are merged; or old pages have 4 bits.
SETTINGS = {
    "16 bits": {
        "bits": 16,
        "window": 64,
        "segment": 128,
        "interval": 128,
        "tiers": [
            {"name": "first", "layers": "0", "keep": 0.5},
            {"name": "second", "layers": "1", "keep": 0.125},
        ],
    },
    "4 bits": {"bits": 4, "keep": 0.5, "window": 32, "interval": 96},
}


def make_llm(folder, settings: dict | None, **options):
    """An engine on a model of `run_runner.make_model`; without settings it does not evict."""
    from vllm import LLM

    ours = {"block_size": 32}
    if settings is not None:
        ours = engine_args("entropykv", **settings, debug=True)
    return LLM(
        str(folder),
        dtype="float32",
        skip_tokenizer_init=True,
        max_model_len=MAX_LEN,
        max_num_batched_tokens=8192,
        max_num_seqs=32,
        enforce_eager=True,
        kv_cache_memory_bytes=POOL,
        **ours,
        **options,
    )


@dataclass
class Watched(Engine):
    """An engine of the tests, and what is seen at each step.

    Attributes:
        poisonous: whether pages that are free and hold nothing known become NaN before each step.
        moved: moves so far, of which `in_place` wrote over pages that they had read.
        reused: pages that were given out in the step that freed them.
    """

    poisonous: bool = False
    moved: int = 0
    in_place: int = 0
    reused: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._schedule, self.scheduler.schedule = self.scheduler.schedule, self._planned

    @property
    def worker(self):
        return self.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker

    @property
    def pool(self):
        return self.scheduler.kv_cache_manager.block_pool

    def _planned(self, *args, **kwargs):
        output = self._schedule(*args, **kwargs)
        moves = getattr(output, MOVES)
        freed = {page for move in moves for page in set(move.src) - set(move.dst)}
        self.moved += len(moves)
        self.in_place += sum(bool(set(move.src) & set(move.dst)) for move in moves)
        self.reused += len(freed & set(_handed_out(output)))
        return output

    def add(self, request_id: str, ids: list[int], **params) -> None:
        super().add(request_id, ids, **{"max_tokens": 8, "detokenize": False, **params})

    def step(self) -> list:
        if self.poisonous:
            lost = [b.block_id for b in self.pool.blocks if not b.ref_cnt and not b.block_hash]
            self._disown([self.pool.null_block.block_id, *lost])
        outputs = super().step()
        for request in self.scheduler.running:
            self._compare_rows(request.request_id)
        return outputs

    def _compare_rows(self, name: str) -> None:
        runner = self.worker.model_runner
        for group, tier in enumerate(self.tiers):
            pages = [block.block_id for block in tier.req_to_blocks[name]]
            assert runner.requests[name].block_ids[group] == pages, f"{name} has a stale row"
            row = runner.input_batch.req_id_to_index.get(name)
            if row is not None:
                table = runner.input_batch.block_table[group].block_table.np
                assert table[row, : len(pages)].tolist() == pages, f"{name} has a stale row"

    def _disown(self, pages: list[int]) -> None:
        """Poison pages, of which debug mode may know what they held when they were somebody's."""
        for sums in self.worker._checksums.sums.values():
            for page in pages:
                sums.pop(page, None)
        self.poison(pages)

    def poison(self, pages: list[int]) -> None:
        """Fill pages of all layers with NaN."""
        for tier in self.worker._tier_layers.values():
            for cache in tier.caches:
                cache[pages] = math.nan

    def in_chunks(self, tokens: int) -> None:
        """Let steps have so many tokens, from now on."""
        self.scheduler.max_num_scheduled_tokens = tokens

    @contextlib.contextmanager
    def tight(self, *lengths: int) -> Iterator[None]:
        """Only the pages that requests of these lengths hold at most; others belong to nobody."""
        plans = [tier.plan for tier in self.tiers]
        room = sum(peak_pages(plan, length) for plan in plans for length in lengths)
        kept = self.pool.get_new_blocks(self.pool.get_num_free_blocks() - room)
        self.tiers[0].req_to_blocks["nobody"] = kept  # so that debug mode knows an owner
        try:
            yield
        finally:
            self.pool.free_blocks(self.tiers[0].req_to_blocks.pop("nobody"))
