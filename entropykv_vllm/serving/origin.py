# SPDX-License-Identifier: Apache-2.0
"""What a process runs: which version of this package, with which settings, on which machine."""

from __future__ import annotations

import hashlib
import socket

from vllm.utils.network_utils import get_ip

from entropykv_vllm.config.settings import EvictionConfig
from entropykv_vllm.pages.spec import Origin
from entropykv_vllm.version import __version__


def origin_of(settings: EvictionConfig) -> Origin:
    """The origin of what this process makes with `settings`."""
    digest = hashlib.sha256(settings.model_dump_json().encode()).hexdigest()[:16]
    return Origin(__version__, digest, f"{socket.gethostname()} ({get_ip()})")
