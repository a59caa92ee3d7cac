# SPDX-License-Identifier: Apache-2.0
"""Requests that depart from the server's settings, and the names of their pages.

What is in a page depends on what was evicted before it, so pages of requests that ask for different
things must have different names in the prefix cache: they get hashes of their own. The list of a
request's hashes carries what it asked for, since that is all that vLLM shows to a lookup.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.request import Request

from entropykv_vllm.plan.request import AS_SERVED, Control, before

_CONTROL = "entropykv_control"

#: vLLM's: the hashes of the full blocks that a request got since it was last asked.
Hasher = Callable[[Request], list[BlockHash]]


def control_of(request: Request) -> Control:
    """What a request asked for."""
    return getattr(request, _CONTROL, AS_SERVED)


def control_of_hashes(hashes: Sequence[Any]) -> Control:
    """What the request of these block hashes asked for."""
    return getattr(hashes, _CONTROL, AS_SERVED)


class Hashes(list[BlockHash]):
    """The block hashes of a request that asked for something."""

    entropykv_control: Control


def control(request: Request, asked: Control, block: int) -> None:
    """Give a request what it asked for, before it is scheduled.

    Args:
        request: as it came.
        asked: for what.
        block: tokens for each of vLLM's block hashes.
    """
    if asked == AS_SERVED:
        return
    setattr(request, _CONTROL, asked)
    if request._block_hasher is None:
        return  # without a prefix cache there are no names
    request._block_hasher = _Hasher(request._block_hasher, asked, block)
    request.block_hashes = Hashes()
    request.block_hashes.entropykv_control = asked
    request.update_block_hashes()


def release(request: Request) -> None:
    """Serve a request from now on as others are; it must hold no pages."""
    setattr(request, _CONTROL, AS_SERVED)
    if isinstance(hasher := request._block_hasher, _Hasher):
        request._block_hasher, request.block_hashes = hasher.inner, hasher.plain


@dataclass
class _Hasher:
    """Names the blocks of one request: vLLM's hash, and what of the wish bears on the prefix.

    What is to be protected further on does not matter yet, so requests that differ in it share the
    pages before.
    """

    inner: Hasher
    asked: Control
    block: int
    plain: list[BlockHash] = field(default_factory=list)

    def __call__(self, request: Request) -> list[BlockHash]:
        named = request.block_hashes
        del self.plain[
            len(named) :
        ]  # vLLM shortens them when a session goes on from an earlier token
        request.block_hashes = self.plain
        try:
            new = self.inner(request)
        finally:
            request.block_hashes = named
        first = len(self.plain)
        self.plain.extend(new)
        return [self._name(first + i, plain) for i, plain in enumerate(new)]

    def _name(self, index: int, plain: BlockHash) -> BlockHash:
        known = before(self.asked.protect, (index + 1) * self.block)
        wish = replace(self.asked, protect=known)
        return BlockHash(hashlib.sha256(plain + repr(wish).encode()).digest())
