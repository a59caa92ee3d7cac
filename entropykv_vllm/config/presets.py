# SPDX-License-Identifier: Apache-2.0
"""Which policy each preset is made for."""

from __future__ import annotations

# name of a preset -> the policy that it is made for, from much memory to little
PRESETS = {
    "quality": "entropykv",
    "balanced": "entropykv",
    "long-context": "entropykv",
    "extreme": "entropykv",
    "max": "entropykv",
    "streaming": "sink",
}
