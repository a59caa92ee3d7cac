# SPDX-License-Identifier: Apache-2.0
"""A process that does what a worker of vLLM does before it has a model, and says how it went.

`python -m entropykv_vllm.doctor.probe` prints one line of JSON: part -> what it found, or why it
failed.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: Bytes for which huge pages are asked: 16 of the usual size.
ASKED = 32 << 20


def vllm() -> dict[str, Any]:
    """Which vLLM this process imports."""
    import vllm

    return {"version": vllm.__version__}


def plugin() -> dict[str, Any]:
    """Load vLLM's plugins, ours among them."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    if not hasattr(EngineArgs, "_entropykv_flags"):
        from entropykv_vllm.serving.plugin import register

        register()  # says why, where vLLM only logged it
        raise RuntimeError("vLLM did not load it")
    return {}


def worker() -> dict[str, Any]:
    """Import the worker and the scheduler by their names, and look where they would run."""
    from vllm.platforms import current_platform
    from vllm.utils.import_utils import resolve_obj_by_qualname

    from entropykv_vllm.serving.settings import SCHEDULER, WORKER

    resolve_obj_by_qualname(SCHEDULER)
    device = "cpu" if current_platform.is_cpu() else current_platform.device_type
    return {
        "worker": resolve_obj_by_qualname(WORKER).__name__,
        "platform": type(current_platform).__name__,
        "device": device,
    }


def kernels() -> dict[str, Any]:
    """Load the native kernels for CPUs."""
    from entropykv_vllm.kernels import native

    if not native.load():
        return {"built": False}
    return {"built": True, "isa": native.isa(), "supported": native.supported()}


def cuda() -> dict[str, Any]:
    """Load those for GPUs, where there is one."""
    import torch

    from entropykv_vllm.kernels import cuda

    if not torch.cuda.is_available():
        return {"gpu": None, "loaded": False}
    return {"gpu": torch.cuda.get_device_name(), "loaded": cuda.load()}


def pages() -> dict[str, Any]:
    """Ask for huge pages, write to the memory, and count those that came."""
    import torch

    from entropykv_vllm.kernels import hugepages

    before = _huge_bytes()
    memory = torch.empty(ASKED, dtype=torch.uint8)
    hugepages.advise(memory)
    memory[:: mmap.PAGESIZE] = 1
    return {"allowed": hugepages.allowed(), "asked": ASKED, "given": _huge_bytes() - before}


def _huge_bytes() -> int:
    """Bytes of huge pages that this process has."""
    lines = (line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines())
    return next((int(words[1]) << 10 for words in lines if words[0] == "AnonHugePages:"), 0)


PARTS: tuple[Callable[[], dict[str, Any]], ...] = (vllm, plugin, worker, kernels, cuda, pages)


def outcome(part: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What a part found, or `{"error": sentence}`: one that fails stops none of the others."""
    try:
        return part()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}".split("\n")[0]}


def main() -> None:
    """Run all parts; whatever they print goes to standard error."""
    with contextlib.redirect_stdout(sys.stderr):
        found = {part.__name__: outcome(part) for part in PARTS}
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
