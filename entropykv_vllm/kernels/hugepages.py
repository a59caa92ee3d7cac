# SPDX-License-Identifier: Apache-2.0
"""Huge pages under a tensor: attention reads pages at random, which small ones slow down."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

from torch import Tensor

# linux/mman.h; COLLAPSE (Linux 6.1) also merges pages that were touched before.
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25

_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def allowed() -> bool:
    """Whether this system hands out huge pages to those who ask."""
    return _ENABLED.exists() and "[never]" not in _ENABLED.read_text()


def advise(tensor: Tensor) -> bool:
    """Ask for huge pages under a CPU tensor: where it was touched now, elsewhere at first touch.

    Returns:
        Whether the system agreed.
    """
    page = mmap.PAGESIZE
    start = -(-tensor.data_ptr() // page) * page
    size = (tensor.data_ptr() + tensor.untyped_storage().nbytes() - start) // page * page
    if size <= 0 or not allowed():
        return False
    libc = ctypes.CDLL(None)
    address = ctypes.c_void_p(start), ctypes.c_size_t(size)
    agreed = libc.madvise(*address, _MADV_HUGEPAGE) == 0
    libc.madvise(*address, _MADV_COLLAPSE)  # fails where nothing was touched yet
    return agreed
