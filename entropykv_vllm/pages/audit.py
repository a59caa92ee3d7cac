# SPDX-License-Identifier: Apache-2.0
"""Who owns each page, counted anew: the books of vLLM's pool against all block tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager

#: Pages named in a message.
_SHOWN = 5


class AuditError(RuntimeError):
    """A page that is owned otherwise than the books say: a fault in this package or in vLLM."""


def audit(
    pool: BlockPool,
    managers: Iterable[SingleTypeKVCacheManager],
    deferred: Iterable[KVCacheBlock] = (),
) -> None:
    """Check that each page is free, or held exactly as often as its count says.

    Args:
        pool: vLLM's.
        managers: of all its page groups.
        deferred: pages on their way back to the pool.

    Raises:
        AuditError: in words, with the first pages concerned.
    """
    tables = [t for manager in managers for t in manager.req_to_blocks.values()]
    owners = Counter(block.block_id for table in tables for block in table if not block.is_null)
    owners.update(block.block_id for block in deferred if not block.is_null)
    free = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
    known = {block.block_id for block in pool.blocks if not block.is_null}
    counts = {page: pool.blocks[page].ref_cnt for page in known}
    for fault, pages in (
        ("are free twice", [page for page, times in Counter(free).items() if times > 1]),
        ("are held and free at once", set(free) & set(owners)),
        ("belong to nobody and are not free", known - set(free) - set(owners)),
        ("are held more or less often than counted", _miscounted(owners, counts)),
    ):
        if pages:
            shown = ", ".join(map(str, sorted(pages)[:_SHOWN]))
            raise AuditError(f"{len(pages)} pages {fault}: {shown}")


def _miscounted(owners: Counter[int], counts: dict[int, int]) -> list[int]:
    return [page for page, count in counts.items() if owners[page] != count]
