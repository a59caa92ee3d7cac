# SPDX-License-Identifier: Apache-2.0
"""The kernels of `csrc/`, as `torch.ops.entropykv`."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch

#: Instruction sets, least first; the environment variable ENTROPYKV_ISA names the highest to use.
#: "amx" is used only where it is named; "amx_emulated" is its code on plain arrays, for tests.
ALL_ISAS = ("generic", "avx2", "avx512", "avx512_bf16", "amx_emulated", "amx")


#: The scores that the kernels compute themselves; others are given to them.
SCORES = ("entropykv", "norm", "knorm", "keydiff", "random", "sink", "window")


@lru_cache(maxsize=1)
def load() -> bool:
    """Register the operators in this process; False if they were not built.

    Raises:
        ValueError: ENTROPYKV_ISA names no instruction set.
    """
    try:
        importlib.import_module("entropykv_vllm._C")
    except ImportError:
        return False
    for name in ("write", "attention", "observe", "collapse", "drop"):
        torch.library.register_fake(f"entropykv::{name}")(_nothing)
    return True


def _nothing(*args, **kwargs) -> None:
    """What these operators return: they write into their arguments."""


def isa() -> str:
    """The instruction set in use."""
    load()
    return torch.ops.entropykv.isa()


def supported() -> tuple[str, ...]:
    """The instruction sets that this machine can run."""
    if not load():
        return ()
    before = isa()
    names = tuple(name for name in ALL_ISAS if torch.ops.entropykv.use_isa(name))
    torch.ops.entropykv.use_isa(before)
    return names


@contextmanager
def use(name: str) -> Iterator[None]:
    """Run with another instruction set.

    Raises:
        ValueError: this machine cannot run it.
    """
    before = isa()
    if not torch.ops.entropykv.use_isa(name):
        raise ValueError(f"this machine cannot run {name}, only {', '.join(supported())}")
    try:
        yield
    finally:
        torch.ops.entropykv.use_isa(before)
