# SPDX-License-Identifier: Apache-2.0
"""The entry point that vLLM loads in each of its processes."""

from __future__ import annotations


def register() -> None:
    """Add our flags to vLLM's, and what requests may ask for; may be called again."""
    from entropykv_vllm.serving import flags, requests

    flags.install()
    requests.install()
