# SPDX-License-Identifier: Apache-2.0
"""What eviction costs and what it gains, measured through the vLLM engine."""
