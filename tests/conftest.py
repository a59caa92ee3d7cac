# SPDX-License-Identifier: Apache-2.0
"""How vLLM runs in the tests, as in the Makefile; set before anything imports vLLM."""

import os

import pytest

DEFAULTS = {
    "OMP_NUM_THREADS": str(os.cpu_count()),
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    # A cluster that lives as long as a test has no tokens to share.
    "RAY_AUTH_MODE": "disabled",
    # The engine runs in the test's own process, so that a test can look into its scheduler.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
for name, value in DEFAULTS.items():
    os.environ.setdefault(name, value)
# It would override the pool sizes that tests ask for.
os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Side by side run files, and of one file the tests with engines of other settings."""
    for item in items:
        call = getattr(item, "callspec", None)
        engine = call.params.get("engine", "") if call else ""
        item.add_marker(pytest.mark.xdist_group(f"{item.path} {engine}"))
