# SPDX-License-Identifier: Apache-2.0
"""`entropykv bench-kernels`: our kernels for CPUs next to vLLM's."""
