# SPDX-License-Identifier: Apache-2.0
"""Which layers of a model have a sliding window; the others have full attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

#: Types whose files may not name their layers: every so many layers, one has full attention.
PERIODS = {"cohere2": 4, "gemma2": 2, "gemma3_text": 6, "olmo3": 4}

_FULL, _SLIDING = "full_attention", "sliding_attention"


def layer_windows(config: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    """The sliding window of each layer in tokens, None where attention is full.

    Raises:
        ValueError: if there are layers of another kind, or not as many as are named.
    """
    window = config.get("sliding_window") or None
    if config.get("use_sliding_window") is False:
        window = None
    kinds = config.get("layer_types") or _kinds(config, layers, window)
    _check(kinds, layers)
    return tuple(window if kind == _SLIDING else None for kind in kinds)


def _kinds(config: Mapping[str, Any], layers: int, window: int | None) -> list[str]:
    """The kinds of layers of a file that does not name them."""
    if window is None:
        return [_FULL] * layers
    kind = str(config.get("model_type"))
    if kind in ("qwen2", "qwen3"):
        first = config.get("max_window_layers", 28)
        return [_SLIDING if layer >= first else _FULL for layer in range(layers)]
    written = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern")
    period = written or PERIODS.get(kind)
    if period is None:
        return [_SLIDING] * layers
    return [_FULL if (layer + 1) % period == 0 else _SLIDING for layer in range(layers)]


def _check(kinds: Sequence[str], layers: int) -> None:
    if len(kinds) != layers:
        raise ValueError(
            f"the model names the kinds of {len(kinds)} layers and has {layers}: leave --layers out"
        )
    for kind in kinds:
        if kind not in (_FULL, _SLIDING):
            raise ValueError(
                f"the model has layers of the kind '{kind}', whose memory is not counted: "
                "choose another model"
            )
