# SPDX-License-Identifier: Apache-2.0
"""Whose memory grows as a server on a CPU meets ever new numbers of tokens? Not the plugin's.

`python -m tests.soak.products` shows it.
vLLM multiplies with oneDNN, which compiles a product for each number of rows and keeps the last
1,024 of them, or as many as `VARIABLE` says. No plugin is loaded here, and no server: only the
products of one layer.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time

import psutil

from entropykv_vllm.evaluation import table

#: How many products are kept: what says it, oneDNN's own choice, and what bounds it.
VARIABLE, DEFAULT, BOUND = "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "1024", "64"
#: Rows and columns of the weights of one layer of the embedded model.
WEIGHTS = [(960, 576), (576, 576), (3072, 576), (576, 1536)]
#: How many different numbers of rows, up to this.
SIZES, MOST = 240, 2048


def measure() -> dict[str, float]:
    """Multiply twice with each number of rows, in this process."""
    import torch
    from vllm import _custom_ops as ops
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    layer = [(ops.create_onednn_mm(torch.randn(n, k).t(), 32), k) for n, k in WEIGHTS]
    rows = torch.randn(MOST, max(k for _, k in layer))
    sizes = [MOST, *random.Random(0).sample(range(1, MOST), SIZES)]
    own, seconds = [], []
    for begin, end in ((0, 1), (1, 1 + SIZES), (1, 1 + SIZES)):
        start = time.monotonic()
        for size in sizes[begin:end]:
            for product, k in layer:
                ops.onednn_mm(product, rows[:size, :k].contiguous(), None)
        seconds.append(time.monotonic() - start)
        own.append(psutil.Process().memory_full_info().uss / 2**20)
    return {"first": own[1] - own[0], "second": own[2] - own[1], "seconds": seconds[2]}


def main() -> None:
    """Print what each capacity takes."""
    if sys.argv[1:] == ["here"]:
        print(json.dumps(measure()))
        return
    rows = []
    for capacity in (DEFAULT, BOUND):
        env = {**os.environ, VARIABLE: capacity}
        words = [sys.executable, "-m", __spec__.name, "here"]
        run = subprocess.run(words, env=env, check=True, capture_output=True, text=True)
        seen = json.loads(run.stdout.splitlines()[-1])
        rows.append([capacity, *(f"{seen[name]:.0f}" for name in ("first", "second", "seconds"))])
    head = ["products kept", f"MiB for {SIZES} sizes", "MiB for the same again", "s for the same"]
    print(table.render(head, rows))


if __name__ == "__main__":
    main()
