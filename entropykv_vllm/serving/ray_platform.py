# SPDX-License-Identifier: Apache-2.0
"""vLLM's platform for CPUs, with a word for Ray."""

from __future__ import annotations

from vllm.platforms import cpu_platform_plugin
from vllm.utils.import_utils import resolve_obj_by_qualname

_STOCK = resolve_obj_by_qualname(cpu_platform_plugin())


class RayCpuPlatform(_STOCK):  # type: ignore[valid-type]
    """vLLM's own names none of Ray's resources that a worker takes, and so refuses Ray."""

    #: As on every other platform: `ray start --num-gpus N` says how many workers a machine takes.
    ray_device_key = "GPU"
