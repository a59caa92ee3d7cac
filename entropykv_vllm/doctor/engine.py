# SPDX-License-Identifier: Apache-2.0
"""vLLM, the plugin in it, and the kernels: what `probe` saw in a process like a worker."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import Any

from entropykv_vllm.doctor.check import Check, ok
from entropykv_vllm.version import SUPPORTED_VLLM, __version__, fits

#: What `probe` prints: part -> what it found.
Probed = dict[str, dict[str, Any]]

#: Of vLLM, which load our plugin from them.
GROUPS = ("vllm.general_plugins", "vllm.platform_plugins", "vllm.stat_logger_plugins")

PATIENCE = 180  # seconds; a busy machine takes half a minute to import vLLM
_SUPPORTED = " or ".join(SUPPORTED_VLLM)
_REINSTALL = "Install this package next to vLLM: pip install --no-build-isolation ."


def probe() -> Probed:
    """Run `probe` in a process of its own; parts of one that died say how it did."""
    command = [sys.executable, "-m", "entropykv_vllm.doctor.probe"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        return _all_failed(f"not ready after {PATIENCE} seconds")
    if done.returncode:
        said = [*done.stderr.strip().splitlines(), f"exit status {done.returncode}"]
        return _all_failed(f"the process died: {said[0 if len(said) == 1 else -2]}")
    return dict(json.loads(done.stdout))


def _all_failed(reason: str) -> Probed:
    parts = ("vllm", "plugin", "worker", "kernels", "cuda", "pages")
    return {part: {"error": reason} for part in parts}


def checks(probed: Probed) -> list[Check]:
    """All that is about software; without vLLM there is nothing to load a plugin."""
    if find_spec("vllm") is None:
        missing = "not installed next to this Python"
        return [Check("vLLM", "fail", missing, f"Install vLLM {_SUPPORTED}."), kernels(probed)]
    found = [version(probed), entries(), plugin(probed), worker(probed), kernels(probed)]
    return [*found, *cuda(probed)]


def version(probed: Probed) -> Check:
    """Is vLLM a supported one?"""
    if error := probed["vllm"].get("error"):
        return Check("vLLM", "fail", error, f"Install vLLM {_SUPPORTED} anew.")
    number = probed["vllm"]["version"]
    if not fits(number):
        return Check("vLLM", "fail", number, f"Install vLLM {_SUPPORTED}.")
    return ok("vLLM", number)


def entries() -> Check:
    """Is the plugin installed where vLLM looks for it, and may it be loaded?"""
    name, ours = "entry points", "entropykv"
    missing = [group for group in GROUPS if not entry_points(group=group, name=ours)]
    if missing:
        return Check(name, "fail", f"none of ours in {', '.join(missing)}", _REINSTALL)
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and ours not in allowed.split(","):
        advice = f"Add {ours} to VLLM_PLUGINS, or unset it."
        return Check(name, "fail", f"VLLM_PLUGINS={allowed} leaves ours out", advice)
    return ok(name, f"EntropyKV {__version__} in {len(GROUPS)} groups")


def plugin(probed: Probed) -> Check:
    """Did a worker load it?"""
    if error := probed["plugin"].get("error"):
        return Check("plugin", "fail", error, f"Mend what it says. {_REINSTALL}")
    return ok("plugin", "loaded in a process like a worker's")


def worker(probed: Probed) -> Check:
    """Do the classes come that the server's settings name, on a platform that is served?"""
    part = probed["worker"]
    if error := part.get("error"):
        return Check("worker", "fail", error, f"Mend what it says. {_REINSTALL}")
    found = f"{part['worker']} on {part['platform']}"
    if part["device"] not in ("cpu", "cuda"):
        advice = "Use a build of vLLM for CPUs or for CUDA GPUs."
        return Check("worker", "fail", found, advice)
    return ok("worker", found)


def kernels(probed: Probed) -> Check:
    """Were the kernels for CPUs built, and which instruction set do they use?"""
    part, build = probed["kernels"], "Install g++, then this package once more."
    if error := part.get("error"):
        advice = "Install torch." if "torch" in error else "Mend what it says."
        return Check("kernels", "fail", error, advice)
    if not part["built"]:
        found = "not built: plain torch, slow"
        return ok("kernels", found) if on_gpu(probed) else Check("kernels", "warn", found, build)
    if (isa := part["isa"]) == "generic":
        advice = "Serve on a processor with AVX2 or more, and leave out ENTROPYKV_ISA=generic."
        return Check("kernels", "warn", "native, generic: slow", advice)
    return ok("kernels", f"native, {isa}")


def cuda(probed: Probed) -> list[Check]:
    """The kernels for GPUs, where there is one."""
    part = probed["cuda"]
    if part.get("error") or part["gpu"] is None:
        return []
    if part["loaded"]:
        return [ok("CUDA kernels", f"loaded, {part['gpu']}")]
    advice = "Put nvcc on the PATH, then install this package once more."
    return [Check("CUDA kernels", "warn", f"not built: Triton's run, {part['gpu']}", advice)]


def on_gpu(probed: Probed) -> bool:
    """Would a worker run on a GPU?"""
    return probed["worker"].get("device") == "cuda"
