# SPDX-License-Identifier: Apache-2.0
"""`make gpu-check`: build, check and time the kernels for GPUs, in minutes.

It needs torch with CUDA, triton and, for the CUDA kernels, nvcc; vLLM it does not need.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from entropykv_vllm.evaluation.gpu_check import checks, clock, kernels, speed
from entropykv_vllm.evaluation.gpu_check.pools import Shape
from entropykv_vllm.evaluation.table import render

#: Those of Llama-3.1-8B and of Qwen2.5-7B.
SHAPES = (Shape(32, 8, 128, 32), Shape(28, 4, 128, 32))
TOKENS = (4096, 32768, 131072)
REQUESTS = (1, 8, 64)


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    p = argparse.ArgumentParser(prog="gpu_check", description=(__doc__ or "").split("\n")[0])
    p.add_argument("--device", default="cuda", help="where to run (default: %(default)s)")
    p.add_argument("--small", action="store_true", help="few and small cases, to try it out")
    p.add_argument("--only", choices=("checks", "speed"), help="one half of it")
    p.add_argument("--arch", action="store_true", help="only print what nvcc calls the GPU")
    p.add_argument("--out", type=Path, default=Path("results/gpu-check.json"), help="%(default)s")
    p.add_argument("--seed", type=int, default=time.time_ns() % 2**31, help="default: the time")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit status is 1 if a kernel is wrong."""
    args = parser().parse_args(argv)
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        print("gpu_check: error: torch sees no CUDA device here", file=sys.stderr)
        return 2
    if (index := torch.device(args.device).index) is not None:
        torch.cuda.set_device(index)
    if args.arch:
        print("{}{}".format(*torch.cuda.get_device_capability()))
        return 0
    torch.manual_seed(args.seed)
    report: dict[str, Any] = {"machine": machine(args.device), "seed": args.seed}
    print(json.dumps(report, indent=2), flush=True)
    kinds = kernels.found(args.device)
    if args.only != "speed":
        report["checks"] = check(args.device, kinds, args.small)
        save(report, args.out)
    if args.only != "checks":
        report |= measure(args.device, kinds, args.small)
        save(report, args.out)
    wrong = [c for c in report.get("checks", []) if not c["right"]]
    return 1 if wrong else 0


def save(report: dict[str, Any], out: Path) -> None:
    """Write what there is so far; what comes after the checks may break off."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=2) + "\n")


def machine(device: str) -> dict[str, Any]:
    """What it runs on."""
    import triton

    about: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": sys.version.split()[0],
    }
    if device.startswith("cuda"):
        card = torch.cuda.get_device_properties(device)
        about |= {"gpu": card.name, "memory": card.total_memory, "cuda": torch.version.cuda}
        about["multiprocessors"] = card.multi_processor_count
    return about


def check(device: str, kinds: dict[str, Any], small: bool) -> list[dict[str, Any]]:
    """Run every check; print those that fail, and a count."""
    found: list[dict[str, Any]] = []
    cases = checks.FEW if small else checks.ALL
    for name, run, limit in checks.all_checks(device, kinds, cases):
        try:
            error, why = run(), ""
        except Exception as problem:  # a kernel that does not even run is one of the findings
            error, why = float("inf"), f" ({type(problem).__name__}: {problem})"
        right = error <= limit
        found.append({"check": name, "error": error, "limit": limit, "right": right})
        if not right:
            print(f"WRONG  {name}: {error:.3g}, at most {limit:g}{why}", flush=True)
    print(f"{sum(c['right'] for c in found)} of {len(found)} checks right", flush=True)
    return found


def measure(device: str, kinds: dict[str, Any], small: bool) -> dict[str, Any]:
    """Time it all, and print the tables."""
    size = 1 << (14 if small else 30)
    bandwidth = clock.copy_bandwidth(device, size)
    print(f"\ncopy: {bandwidth / 1e9:.0f} GB/s, read and written\n", flush=True)
    shapes = checks.FEW.shapes if small else SHAPES
    tokens = (288,) if small else TOKENS
    requests = (2,) if small else REQUESTS
    decode = [
        speed.decode(shape, count, length, device, bandwidth)
        for shape in shapes
        for length in tokens
        for count in requests
    ]
    print(decode_table(decode) + "\n", flush=True)
    queries = 16 if small else 2048
    prefill = [speed.prefill(s, n, queries, device) for s in shapes for n in tokens[:2]]
    print(prefill_table(prefill) + "\n", flush=True)
    collapse = [row for s in shapes for row in speed.collapses(s, kinds, device, bandwidth, size)]
    print(collapse_table(collapse), flush=True)
    return {"copy": bandwidth, "decode": decode, "prefill": prefill, "collapse": collapse}


def decode_table(rows: list[dict[str, Any]]) -> str:
    """A row a case: the best of torch, and for each format our time, speed-up and bandwidth."""
    header = ["decode", "requests", "tokens", "best of torch, ms"]
    header += [f"{bits} bits: ms (speed-up, of limit)" for bits in speed.BITS]
    return render(header, [[*_case(row), *_formats(row)] for row in rows])


def prefill_table(rows: list[dict[str, Any]]) -> str:
    """A row a case: the best of torch, and for each format our time and speed-up."""
    header = ["prefill", "requests", "tokens", "best of torch, ms"]
    return render(
        [*header, *(f"{bits} bits: ms (speed-up)" for bits in speed.BITS)],
        [[*_case(row), *_formats(row)] for row in rows],
    )


def _best(row: dict[str, Any]) -> float | None:
    """Seconds of the fastest baseline, if one ran."""
    return min((row["baseline"] or {}).values(), default=None)


def _case(row: dict[str, Any]) -> list[str]:
    best, missing = _best(row), "no memory" if row["baseline"] is None else "none ran"
    case = [row["shape"], str(row["requests"]), str(row["tokens"])]
    return [*case, missing if best is None else f"{1e3 * best:.3f}"]


def _formats(row: dict[str, Any]) -> list[str]:
    best = _best(row)
    cells = []
    for bits in speed.BITS:
        if (mine := row.get(f"{bits} bits")) is None:
            cells.append("no memory")
            continue
        more = [f"{best / mine['seconds']:.2f}x"] if best else []
        more += [f"{mine['of limit']:.0%}"] if "of limit" in mine else []
        cells.append(f"{1e3 * mine['seconds']:.3f} ({', '.join(more)})")
    return cells


def collapse_table(rows: list[dict[str, Any]]) -> str:
    """A row a kernel and format."""
    header = ["collapse", "kernel", "bits", "keep", "ms", "GB/s", "of copy"]
    return render(
        header,
        [
            [
                row["shape"],
                row["kernel"],
                str(row["bits"]),
                f"{row['keep']:g}",
                f"{1e3 * row['seconds']:.3f}",
                f"{row['GB/s']:.0f}",
                f"{row['of copy']:.0%}",
            ]
            for row in rows
        ],
    )
