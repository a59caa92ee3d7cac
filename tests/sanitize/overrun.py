# SPDX-License-Identifier: Apache-2.0
"""Writes a token behind the end of its cache's memory, which a sanitizer must see."""

import os

from .plugin import load

if __name__ == "__main__":
    load(os.environ["SANITIZED_LIBRARY"])
    import torch

    rows, cache = torch.zeros(1, 1, 16), torch.zeros(1, 1, 16, 32)
    # The tensor does not know: its last channels are those of the last token's value.
    cache.untyped_storage().resize_(cache.nbytes - 64)
    torch.ops.entropykv.write(rows, rows, cache, torch.tensor([15]))
