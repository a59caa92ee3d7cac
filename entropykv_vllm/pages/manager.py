# SPDX-License-Identifier: Apache-2.0
"""The page manager of one tier: which page slots its requests hold, in the scheduler process."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    BlockHashList,
    KVCacheBlock,
    make_block_hash_with_group_id,
    resolve_block_hashes,
)
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry
from vllm.v1.request import Request

from entropykv_vllm.pages.control import control_of, control_of_hashes
from entropykv_vllm.pages.hits import content_hash, longest_hit
from entropykv_vllm.pages.moves import PageMove
from entropykv_vllm.pages.spec import TierSpec
from entropykv_vllm.plan.request import AS_SERVED, request_plan
from entropykv_vllm.plan.schedule import (
    ColdPage,
    Move,
    TierPlan,
    boundary,
    cold_count,
    hot_start,
    moves,
    reserved_pages,
)

#: One order over all tiers: a page freed by one may be taken by another in the same step.
_ORDER = itertools.count()


@dataclass
class Progress:
    """How far a request is: its last whole boundary, and the moves done of the next one.

    `cold` pages and the entry of the first hot one are those of the boundary.
    """

    at: int = 0
    moves_done: int = 0
    cold: int = 0
    first_hot: int = 0

    def reach(self, plan: TierPlan, at: int) -> None:
        """Stand at a boundary, all its moves done."""
        self.at, self.moves_done = at, 0
        self.cold, self.first_hot = cold_count(plan, at), hot_start(plan, at) // plan.page


#: Of a request of which no page was moved.
_START = Progress()


@dataclass
class TierCounts:
    """What a tier did since the last call of `take_counts`.

    `hot` and `cold` are held now, and `holes` are the table entries that have no page any more.
    """

    hot: int = 0
    cold: int = 0
    holes: int = 0
    freed: int = 0
    tokens_evicted: int = 0
    collapses: int = 0
    copies: int = 0


class TierManager(SingleTypeKVCacheManager):
    """Takes the place of vLLM's manager for the layers of a tier.

    Moves are planned in `remove_skipped_blocks`, which vLLM calls before it allocates anything
    for a request; the scheduler sends them to the workers, which carry them out before the step.
    """

    kv_cache_spec: TierSpec

    def __init__(self, kv_cache_spec: TierSpec, **kwargs) -> None:
        super().__init__(kv_cache_spec, **kwargs)
        self.plan = kv_cache_spec.plan
        #: The scheduler's requests by id, each of which may have a plan of its own.
        self.requests: Mapping[str, Request] = {}
        self.progress: dict[str, Progress] = {}
        self.counts = TierCounts()
        self._moves: list[PageMove] = []
        # Cold pages whose hash is entered once vLLM shows us the request's hashes.
        self._unhashed: dict[str, list[tuple[KVCacheBlock, ColdPage]]] = {}
        # Pages in the prefix cache that this step is still to write.
        self._unwritten: dict[str, list[KVCacheBlock]] = {}
        # Requests that could not be collapsed for want of pages: they must not go on.
        self._stuck: set[str] = set()
        # The tokens that a request had when it was let in, and of the last one that asked to be.
        self._whole: dict[str, int] = {}
        self._asking: tuple[str, int] | None = None

    @property
    def has_positionally_stable_blocks(self) -> bool:
        return False

    def plan_of(self, request_id: str) -> TierPlan:
        """The tier's geometry for a request."""
        request = self.requests.get(request_id)
        asked = AS_SERVED if request is None else control_of(request)
        return self.plan if asked is AS_SERVED else request_plan(self.plan, asked)

    # -- planning ------------------------------------------------------------------------------

    def remove_skipped_blocks(
        self,
        request_id: str,
        processed_computed_tokens: int,
        num_prompt_tokens: int | None = None,
    ) -> None:
        """Plan the moves of each boundary that the request has reached."""
        if not self.req_to_blocks.get(request_id):
            return  # prefix hits are adopted later in the same call, in the state they need
        progress = self.progress.get(request_id)
        if progress is None:
            progress = self.progress[request_id] = Progress()
        self._stuck.discard(request_id)
        while progress.at + self.plan.interval <= processed_computed_tokens:
            if not self._advance(request_id, progress):
                self._stuck.add(request_id)
                return

    def _advance(self, request_id: str, progress: Progress) -> bool:
        plan, at = self.plan_of(request_id), progress.at + self.plan.interval
        for move in moves(plan, at)[progress.moves_done :]:
            if not self._move(request_id, move):
                return False
            progress.moves_done += 1
        progress.reach(plan, at)
        return True

    def _move(self, request_id: str, move: Move) -> bool:
        table = self.req_to_blocks[request_id]
        src = [table[entry] for entry in move.src]
        dst = self._destination(src, len(move.dst))
        if dst is None:
            return False
        freed = [block for block in src if block not in dst]
        if self.enable_caching:
            self._await_hash(request_id, src, zip(dst, move.dst, strict=True))
        self._record(request_id, move, src, dst)
        self._rewrite(table, move.src, dst)
        self.block_pool.free_blocks(reversed(freed))
        self._count(move, copied=bool(dst) and dst[0] is not src[0])
        return True

    def _await_hash(
        self,
        request_id: str,
        src: list[KVCacheBlock],
        dst: Iterable[tuple[KVCacheBlock, ColdPage]],
    ) -> None:
        """Note the hashes of `dst`, and drop those of `src` that were still to be entered."""
        waiting = self._unhashed.get(request_id, [])
        kept = [(block, cold) for block, cold in waiting if block not in src]
        self._unhashed[request_id] = [*kept, *dst]

    def _destination(self, src: list[KVCacheBlock], count: int) -> list[KVCacheBlock] | None:
        """Pages for the survivors: fresh ones if the old ones can serve prefix hits.

        None if there is no page to be had: other requests share `src`, and the pool is empty.
        """
        own = src[:count]
        if all(block.ref_cnt == 1 for block in own):
            hashed = any(block.block_hash is not None for block in own)
            if not hashed or self.block_pool.get_num_free_blocks() < count:
                self._forget(own)
                return own
        if self.block_pool.get_num_free_blocks() < count:
            return None
        return self.block_pool.get_new_blocks(count)

    def _forget(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Take pages whose content is about to change out of the prefix cache."""
        self.block_pool.evict_blocks({block.block_id for block in blocks})

    def _record(
        self, request_id: str, move: Move, src: list[KVCacheBlock], dst: list[KVCacheBlock]
    ) -> None:
        self._moves.append(
            PageMove(
                order=next(_ORDER),
                group=self.kv_cache_group_id,
                request_id=request_id,
                entries=move.src,
                src=tuple(block.block_id for block in src),
                dst=tuple(block.block_id for block in dst),
                sinks=move.sinks,
                kind=move.kind,
            )
        )

    def _rewrite(
        self, table: list[KVCacheBlock], entries: Sequence[int], dst: Sequence[KVCacheBlock]
    ) -> None:
        padded = itertools.chain(dst, itertools.repeat(self._null_block))
        for entry, block in zip(entries, padded, strict=False):
            table[entry] = block

    def _count(self, move: Move, copied: bool) -> None:
        read = self.plan.page if move.kind == "collapse" else self.plan.cold
        self.counts.freed += len(move.src) - len(move.dst)
        self.counts.tokens_evicted += len(move.src) * read - len(move.dst) * self.plan.cold
        self.counts.collapses += 1
        self.counts.copies += copied

    def progress_of(self, request_id: str) -> int:
        """The boundary whose moves were last planned for a request, in tokens."""
        return self.progress.get(request_id, _START).at

    def take_moves(self) -> list[PageMove]:
        """End the step's planning: its moves in order, each of which the workers must carry out."""
        planned, self._moves = self._moves, []
        self._unwritten.clear()
        return planned

    def take_counts(self) -> TierCounts:
        """What was done since the last call, and the pages held now."""
        counts, self.counts = self.counts, TierCounts()
        held = [
            (self.progress.get(request_id, _START), len(blocks))
            for request_id, blocks in self.req_to_blocks.items()
        ]
        old = sum(progress.first_hot for progress, _ in held)
        counts.cold = sum(progress.cold for progress, _ in held)
        counts.hot = sum(entries for _, entries in held) - old
        counts.holes = old - counts.cold
        return counts

    # -- allocation ----------------------------------------------------------------------------

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        *args,
        apply_admission_cap: bool = False,
        **kwargs,
    ) -> int:
        """As vLLM's, but a whole request is admitted by its peak, and a stuck one never fits.

        Besides, what others that are still being read will take stays free.
        """
        if apply_admission_cap:
            self._asking = request_id, num_tokens
            adopted = [block for block in new_computed_blocks if not block.is_null]
            fresh = max(0, self._lacking(request_id, num_tokens) - len(adopted))
            return fresh + self._get_num_evictable_blocks(adopted) + self._reserved(request_id)
        if request_id in self._stuck:
            return self.block_pool.num_gpu_blocks
        return super().get_num_blocks_to_allocate(
            request_id, num_tokens, new_computed_blocks, *args, **kwargs
        )

    def _lacking(self, request_id: str, whole: int) -> int:
        """Pages between what a request holds and its peak; a waiting one may hold some, too."""
        entries = len(self.req_to_blocks.get(request_id, ()))
        plan = self.plan_of(request_id)
        return reserved_pages(plan, self.progress_of(request_id), entries, whole)

    def _reserved(self, request_id: str) -> int:
        """What others will take, of which those that have been read need not be looked at again."""
        self._whole = {other: n for other, n in self._whole.items() if not self._is_read(other, n)}
        others = (item for item in self._whole.items() if item[0] != request_id)
        return sum(self._lacking(other, whole) for other, whole in others)

    def _is_read(self, request_id: str, whole: int) -> bool:
        return len(self.req_to_blocks.get(request_id, ())) * self.plan.page >= whole

    def allocate_new_blocks(self, request_id: str, *args, **kwargs) -> list[KVCacheBlock]:
        """As vLLM's; a request that asked to be let in now is."""
        if self._asking is not None and self._asking[0] == request_id:
            self._whole[request_id], self._asking = self._asking[1], None
        return super().allocate_new_blocks(request_id, *args, **kwargs)

    def add_local_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: Sequence[KVCacheBlock],
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:
        """Adopt the pages of a prefix hit: the state of its last boundary, holes included."""
        table = self.req_to_blocks[request_id]
        assert not table
        assert num_external_computed_tokens == 0
        self.block_pool.touch([block for block in new_computed_blocks if not block.is_null])
        table.extend(new_computed_blocks)
        self.num_cached_block[request_id] = len(table)
        progress = self.progress[request_id] = Progress()
        at = boundary(self.plan, num_local_computed_tokens)
        progress.reach(self.plan_of(request_id), at)

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """Forget the request, and what was planned for it and not yet sent.

        A request that is preempted after it was scheduled writes nothing in this step: the pages
        it was to write must not be found. (vLLM leaves them in the prefix cache.)
        """
        self.progress.pop(request_id, None)
        self._whole.pop(request_id, None)
        self._stuck.discard(request_id)
        self._unhashed.pop(request_id, None)
        self._moves = [move for move in self._moves if move.request_id != request_id]
        self._forget(self._unwritten.pop(request_id, ()))
        return super().pop_blocks_for_free(request_id)

    # -- prefix cache --------------------------------------------------------------------------

    def cache_blocks(
        self,
        request: Request,
        num_tokens: int,
        retention_interval: int | None = None,
        *,
        replay_boundaries: Sequence[int],
    ) -> None:
        """Enter hot pages under vLLM's hashes, and new cold pages under their own."""
        name = request.request_id
        cached, full = self.num_cached_block.get(name, 0), num_tokens // self.block_size
        if full <= cached and name not in self._unhashed:
            return  # as in most steps that decode
        super().cache_blocks(
            request, num_tokens, retention_interval, replay_boundaries=replay_boundaries
        )
        unwritten = self._unwritten.setdefault(name, [])
        unwritten += self.req_to_blocks[name][cached:full]
        hashes = self._prefix_hashes(request.block_hashes, self.block_pool, self.block_size)
        for block, cold in self._unhashed.pop(name, ()):
            self._enter(block, cold, hashes)
            unwritten.append(block)

    def _enter(self, block: KVCacheBlock, cold: ColdPage, hashes: Sequence[bytes]) -> None:
        key = BlockHash(content_hash(cold, hashes))
        self.block_pool._insert_block_hash(
            make_block_hash_with_group_id(key, self.kv_cache_group_id),
            block,
            num_tokens=(cold.anchor + 1) * self.block_size,
        )

    @staticmethod
    def _prefix_hashes(hashes: BlockHashList, pool: BlockPool, page: int) -> Sequence[bytes]:
        return resolve_block_hashes(hashes, pool.hash_block_size, page)

    @classmethod
    def find_longest_cache_hit(
        cls,
        block_hashes: BlockHashList,
        max_length: int,
        kv_cache_group_ids: list[int],
        block_pool: BlockPool,
        kv_cache_spec: KVCacheSpec,
        drop_eagle_block: bool,
        alignment_tokens: int,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
    ) -> tuple[tuple[list[KVCacheBlock], ...], int]:
        """The longest prefix whose state at its last boundary is cached, cold pages included."""
        assert isinstance(kv_cache_spec, TierSpec)
        plan = request_plan(kv_cache_spec.plan, control_of_hashes(block_hashes))
        pages, length = longest_hit(
            plan,
            cls._prefix_hashes(block_hashes, block_pool, plan.page),
            max_length,
            alignment_tokens,
            lambda key: block_pool.get_cached_block(BlockHash(key), kv_cache_group_ids),
            content_hash,
        )
        holes = [block_pool.null_block] * len(kv_cache_group_ids)
        rows = [pages.get(entry, holes) for entry in range(length // plan.page)]
        return tuple([row[g] for row in rows] for g in range(len(kv_cache_group_ids))), length


# vLLM registers its own specs only while the registry is empty: they must come first.
KVCacheSpecRegistry._ensure_registered()
KVCacheSpecRegistry.register(TierSpec, TierManager, uniform_type_base_spec=TierSpec)
