# SPDX-License-Identifier: Apache-2.0
"""`python -m entropykv_vllm.evaluation.gpu_check`."""

from __future__ import annotations

import sys


def run() -> int:
    """Run the command, or say which package its Python lacks; return the exit status."""
    try:
        from entropykv_vllm.evaluation.gpu_check.command import main
    except ModuleNotFoundError as error:
        print(
            f"gpu_check: error: {sys.executable} has no {error.name}: name a Python that has torch "
            "for CUDA, triton and numpy, as in make gpu-check GPU_PYTHON=/path/to/python",
            file=sys.stderr,
        )
        return 2
    return main()


if __name__ == "__main__":
    raise SystemExit(run())
