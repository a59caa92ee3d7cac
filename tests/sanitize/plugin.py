# SPDX-License-Identifier: Apache-2.0
"""Makes tests load the kernels that sanitizers watch: `pytest -p tests.sanitize.plugin`."""

import importlib.util
import os
import sys
from pathlib import Path

NAME = "entropykv_vllm._C"


def load(path: str) -> None:
    """Take the place of the kernels, before anybody loads them.

    Raises:
        ValueError: nobody watches these.
    """
    import torch

    assert torch  # what the library is linked to
    if b"__asan_init" not in Path(path).read_bytes():
        raise ValueError(f"{path} was built without AddressSanitizer")
    spec = importlib.util.spec_from_file_location(NAME, path)
    sys.modules[NAME] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[NAME])


def loaded() -> set[str]:
    """The kernels' libraries in this process."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[-1] for line in lines if line.endswith("_C.abi3.so")} - {_vllm()}


def _vllm() -> str:
    """vLLM's own extension has the same name."""
    spec = importlib.util.find_spec("vllm")
    return str(Path(spec.origin).with_name("_C.abi3.so")) if spec else ""


def pytest_configure():
    load(os.environ["SANITIZED_LIBRARY"])


def pytest_sessionfinish(session):
    assert loaded() == {os.environ["SANITIZED_LIBRARY"]}, "other kernels were tested"
