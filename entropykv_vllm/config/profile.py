# SPDX-License-Identifier: Apache-2.0
"""Which model calibrated settings are for."""

from __future__ import annotations

import hashlib
import json
from typing import Any

#: What of a model's configuration decides which of its layers do what.
FIELDS = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "max_position_embeddings",
    "layer_types",
)


def fingerprint(config: Any) -> str:
    """Return the hash of a model's (text) configuration, of transformers, 16 hex digits.

    Models of one architecture and size have the same: a fine-tuned model can use its base's.
    """
    values = {name: getattr(config, name, None) for name in FIELDS}
    kinds = values["layer_types"]
    if kinds is None or set(kinds) == {"full_attention"}:
        values["layer_types"] = None  # which some versions leave out where all layers are alike
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]
