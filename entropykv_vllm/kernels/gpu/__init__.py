# SPDX-License-Identifier: Apache-2.0
"""The ops on pages for GPUs, in Triton; pages have the order "rows" of `kernels.layout`.

These modules import neither vLLM nor the rest of the worker, only torch and triton.
"""
