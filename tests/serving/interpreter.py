# SPDX-License-Identifier: Apache-2.0
"""vLLM's Triton kernels without a GPU: in Triton's interpreter, on CPU tensors."""

import importlib
import os
import sys
from types import ModuleType, SimpleNamespace

import pytest

#: Where vLLM's V2 model runner keeps what a worker knows of its requests.
V2_STATE = ("buffer_utils", "block_table", "states")


class _Driver:
    """What vLLM asks of Triton's CPU backend, which its own wheels have not."""

    @staticmethod
    def is_active() -> bool:
        return True


def install() -> None:
    """Have vLLM find a Triton for CPUs, in this process; before vLLM is imported."""
    assert "vllm.triton_utils" not in sys.modules
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.backends import backends

    backends["cpu"] = SimpleNamespace(compiler=None, driver=_Driver)


def v2_state(patch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """The modules of `V2_STATE` anew, with interpreted kernels, for as long as `patch` lasts."""
    import triton
    import triton.language as tl
    import vllm.triton_utils
    import vllm.v1.worker.cpu_worker  # makes streams and pinned memory harmless
    import vllm.v1.worker.gpu as package
    from vllm.v1.worker.cpu.buffer_utils import UvaBuffer

    patch.setenv("TRITON_INTERPRET", "1")
    patch.setattr(vllm.triton_utils, "triton", triton)
    patch.setattr(vllm.triton_utils, "tl", tl)
    for name in V2_STATE:
        # What is imported anew goes again with the patch, so that others find vLLM's own.
        patch.setattr(package, name, None, raising=False)
        patch.setitem(sys.modules, f"{package.__name__}.{name}", None)
        del sys.modules[f"{package.__name__}.{name}"]
    found = {name: importlib.import_module(f"{package.__name__}.{name}") for name in V2_STATE}
    patch.setattr(found["buffer_utils"], "UvaBuffer", UvaBuffer)
    return found
