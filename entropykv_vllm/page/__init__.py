# SPDX-License-Identifier: Apache-2.0
"""The live page `/entropykv`, on vLLM's own HTTP server."""
