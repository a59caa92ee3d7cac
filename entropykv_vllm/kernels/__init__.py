# SPDX-License-Identifier: Apache-2.0
"""Scores, selection, page layouts and the collapse: plain torch, no vLLM (worker process)."""
