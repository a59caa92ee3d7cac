# SPDX-License-Identifier: Apache-2.0
"""`python -m entropykv_vllm.evaluation.gpu_check`."""

from entropykv_vllm.evaluation.gpu_check.command import main

if __name__ == "__main__":
    raise SystemExit(main())
