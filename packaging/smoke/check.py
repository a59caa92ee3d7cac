# SPDX-License-Identifier: Apache-2.0
"""What must work where nothing but the wheel, what it asks for, and torch are installed.

Run by `run.py` with the Python of such an environment, in a folder that is not the repository's.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import torch

import entropykv_vllm
from entropykv_vllm.config.presets import PRESETS
from entropykv_vllm.kernels import native, reference
from entropykv_vllm.kernels.formats import cold_capacity, write_cold
from entropykv_vllm.version import __version__

#: Of the largest |value|: some instruction sets multiply 16-bit numbers.
TOLERANCE = 1.5e-2
PAGE, HEADS, HEAD_SIZE, QUERY_HEADS = 32, 2, 64, 4
COLD, HOT, NEW = 2, 50, 3
MODEL = ["--model", "Qwen/Qwen2.5-7B-Instruct", "--weights", "int4", "--gpu", "8GB"]
TRACE = "requests=8 prompt=3000 output=60 rate=4 shared=512"


def check_package(version: str) -> None:
    """The wheel's package, and no other, with the data that it carries."""
    folder = Path(entropykv_vllm.__file__).parent
    assert folder.is_relative_to(sys.prefix), f"{folder} is not this environment's"
    assert __version__ == version, (__version__, version)
    found = {path.stem for path in (folder / "configs").glob("*.yaml")}
    assert set(PRESETS) <= found, found


def check_kernels() -> None:
    """Attention over quantized and new pages, in each instruction set, against plain torch."""
    assert native.load(), "the wheel's kernels do not load"
    for bits in (16, 8, 4):
        expected = attention(reference.attention, bits)
        for isa in native.supported():
            with native.use(isa):
                error = (attention(torch.ops.entropykv.attention, bits) - expected).abs().max()
            assert error <= TOLERANCE, (isa, bits, float(error))


def attention(op, bits: int) -> torch.Tensor:
    """What `op` answers to a few queries of one request: float32 ``[NEW, heads, head size]``."""
    torch.manual_seed(bits)
    table = torch.tensor([[3, 1, 0, 4]], dtype=torch.int32)
    cache = torch.zeros(5, HEADS, PAGE, 2 * HEAD_SIZE)
    old = torch.rand(2, COLD, HEADS, cold_capacity(cache, bits), HEAD_SIZE) * 2 - 1
    write_cold(cache, table[0, :COLD].long(), old[0], old[1], bits)
    new = torch.rand(2, HOT, HEADS, HEAD_SIZE) * 2 - 1
    slots = (table[0, COLD:, None] * PAGE + torch.arange(PAGE)).flatten()[:HOT]
    reference.write(new[0], new[1], cache, slots.long())
    query = torch.randn(NEW, QUERY_HEADS, HEAD_SIZE)
    output = torch.full_like(query, torch.nan)
    starts, cold, hot = (torch.tensor(x, dtype=torch.int32) for x in ([0, NEW], [COLD], [HOT]))
    op(query, cache, output, starts, table, cold, hot, bits, HEAD_SIZE**-0.5, 0.0, None)
    return output


def check_commands() -> None:
    """`entropykv plan` of a known model, and `entropykv simulate` of made-up requests."""
    assert run("version").strip() == __version__
    plan = json.loads(run("plan", *MODEL, "--json"))
    peaks = {cache["cache"]: cache["peak_bytes"] for cache in plan["caches"]}
    assert 0 < peaks["max"] < peaks["full, 16 bits"], peaks
    report = json.loads(run("simulate", *MODEL, "--synthetic", TRACE, "--json", "-"))
    assert [cache["cache"] for cache in report["caches"]] == list(peaks)
    for cache in report["caches"]:
        assert cache["full"]["answer_tokens"] == report["answer_tokens"] > 0, cache


def run(*words: str) -> str:
    """What the installed `entropykv` prints."""
    program = Path(sys.executable).parent / "entropykv"
    return subprocess.run([program, *words], check=True, stdout=subprocess.PIPE, text=True).stdout


def main() -> None:
    """Run all checks; the first that fails ends the process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("version", help="the one that the wheel was built as")
    check_package(parser.parse_args().version)
    check_kernels()
    check_commands()
    python = ".".join(map(str, sys.version_info[:3]))
    print(f"Python {python}, torch {torch.__version__}: {', '.join(native.supported())}")


if __name__ == "__main__":
    main()
