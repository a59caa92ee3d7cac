# SPDX-License-Identifier: Apache-2.0
"""The server that is asked, and the same without the plugin."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import psutil

from entropykv_vllm.evaluation.engines import model_folder
from entropykv_vllm.evaluation.server import serving

#: MiB for pages: a prompt of `bases.TOO_LONG` tokens fits only if it is evicted from.
POOL = 32
#: Without eviction a pool must hold the longest context.
STOCK_POOL = 64
#: Short segments and intervals: a short prompt is evicted from several times.
SETTINGS = '{"bits": 16, "keep": 0.5, "window": 64, "interval": 128, "segment": 128, "debug": true}'
COMMON = [
    *("--max-model-len", "1800", "--max-num-seqs", "64", "--block-size", "32"),
    *("--enforce-eager", "--enable-scale-out", "--kv-cache-dtype", "bfloat16"),
]
MODEL = "SmolLM2-135M-Instruct"
#: vLLM compiles a function for logprobs even so, which takes longer than hundreds of requests.
ENVIRONMENT = {"TORCH_COMPILE_DISABLE": "1"}


def _pool(megabytes: int) -> list[str]:
    return ["--kv-cache-memory-bytes", str(megabytes << 20)]


def evicting() -> contextlib.AbstractContextManager[tuple[str, Path]]:
    """A server with eviction, all pages watched."""
    os.environ |= ENVIRONMENT
    ours = ["--kv-eviction", "entropykv", "--kv-eviction-config", SETTINGS, *_pool(POOL)]
    return serving(model_folder(MODEL), [*ours, *COMMON])


@contextlib.contextmanager
def stock() -> Iterator[tuple[str, Path]]:
    """A server of vLLM alone."""
    os.environ |= ENVIRONMENT | {"VLLM_PLUGINS": ""}
    try:
        with serving(model_folder(MODEL), [*_pool(STOCK_POOL), *COMMON]) as served:
            yield served
    finally:
        del os.environ["VLLM_PLUGINS"]


def family() -> set[int]:
    """The processes of the server that runs."""
    return {process.pid for process in psutil.Process().children(recursive=True)}
