# SPDX-License-Identifier: Apache-2.0
"""The kernels for GPUs, checked and timed where there is one; needs torch and triton, not vLLM."""
