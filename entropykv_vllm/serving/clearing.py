# SPDX-License-Identifier: Apache-2.0
"""Fresh pages are cleared for layers whose kernels are not ours, where other layers quantize.

All layers share one pool, so such a page may hold codes, which read as floats may be NaN. vLLM's
kernels multiply what lies behind a request's last token by 0, and not all of them leave it out: NaN
times 0 is NaN, which spreads. Ours leave it out. vLLM clears pages of pools of more than one
precision; we ask it to, since a `TierSpec` names the precision of its hot pages only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec, MambaSpec

from entropykv_vllm.pages.moves import PageMove
from entropykv_vllm.pages.spec import TierSpec

if TYPE_CHECKING:
    from torch import Tensor


def cleared_groups(config: KVCacheConfig) -> list[int]:
    """The numbers of the page groups that are to get cleared pages."""
    specs = [group.kv_cache_spec for group in config.kv_cache_groups]
    if not any(map(_quantized, specs)):
        return []
    return [
        number
        for number, spec in enumerate(specs)
        if not _quantized(spec) and not isinstance(spec, MambaSpec)
    ]


def _quantized(spec: KVCacheSpec) -> bool:
    return isinstance(spec, TierSpec) and spec.plan.bits < 16


def ask_for(scheduler: Any, managers: Sequence[Any]) -> None:
    """Have vLLM's scheduler tell the workers which pages are fresh, of the groups that need it."""
    for number in cleared_groups(scheduler.kv_cache_config):
        managers[number]._record_new_block_ids = True
        scheduler.needs_kv_cache_zeroing = True


def without_survivors(pages: list[int] | None, moves: Iterable[PageMove]) -> list[int] | None:
    """Pages to clear, but for those that hold survivors once the step's moves are done.

    A request that is preempted in the step that gave it pages leaves them to be cleared, and a move
    of another one may write to them, which comes first.
    """
    if not pages:
        return pages
    written: set[int] = set()
    for move in moves:
        written = (written - set(move.src)) | set(move.dst)
    return [page for page in pages if page not in written]


def clear(caches: Iterable[Tensor], pages: list[int]) -> None:
    """Write zeros to some pages of some layers."""
    for cache in caches:
        cache[pages] = 0
