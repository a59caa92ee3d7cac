# SPDX-License-Identifier: Apache-2.0
"""The entry point that vLLM loads in each of its processes."""

from __future__ import annotations


def register() -> None:
    """Add our flags to vLLM's; may be called again. Nothing else changes until they are used."""
    from entropykv_vllm.serving import flags

    flags.install()
