# SPDX-License-Identifier: Apache-2.0
"""Huge pages under a tensor: attention reads the cache at random, and small pages cost half of it."""

from __future__ import annotations

import ctypes
import mmap

from torch import Tensor

# linux/mman.h; COLLAPSE (Linux 6.1) also merges pages that were touched before.
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25


def advise(tensor: Tensor) -> bool:
    """Ask for huge pages under a CPU tensor, now if the kernel can, else as it is touched.

    Returns:
        Whether the tensor lies in huge pages now.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    page = mmap.PAGESIZE
    start = -(-tensor.data_ptr() // page) * page
    size = (tensor.data_ptr() + tensor.untyped_storage().nbytes() - start) // page * page
    if size <= 0:
        return False
    address = ctypes.c_void_p(start), ctypes.c_size_t(size)
    if libc.madvise(*address, _MADV_HUGEPAGE) != 0:
        return False
    return libc.madvise(*address, _MADV_COLLAPSE) == 0
