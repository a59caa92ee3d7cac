# SPDX-License-Identifier: Apache-2.0
"""Which platform vLLM runs on: on CPUs one that Ray can place workers on.

A small module of its own, which vLLM loads while it makes up its mind where it runs.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from importlib.util import find_spec

_GROUP = "vllm.platform_plugins"


def platform() -> str | None:
    """The name of our platform; None, so that vLLM chooses, off CPUs, or where it can't be used."""
    from vllm.platforms import cpu_platform_plugin

    others = [entry for entry in entry_points(group=_GROUP) if not entry.value.startswith(__name__)]
    if others or find_spec("ray") is None or cpu_platform_plugin() is None:
        return None
    return "entropykv_vllm.serving.ray_platform.RayCpuPlatform"
