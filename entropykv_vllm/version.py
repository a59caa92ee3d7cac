# SPDX-License-Identifier: Apache-2.0
"""The one place that holds the version, and which of vLLM it fits; the build reads it from here."""

__version__ = "0.1.0"

#: The releases of vLLM whose internals are known to fit.
SUPPORTED_VLLM = ("0.32", "0.33")


def fits(vllm: str) -> bool:
    """Whether a version of vLLM is a supported one."""
    return vllm.startswith(tuple(f"{known}." for known in SUPPORTED_VLLM))
