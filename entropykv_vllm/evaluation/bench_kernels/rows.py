# SPDX-License-Identifier: Apache-2.0
"""The tables of the kernel benchmark."""

from __future__ import annotations

from statistics import geometric_mean
from typing import Any

from entropykv_vllm.evaluation import bandwidth, table
from entropykv_vllm.evaluation.bench_kernels.shapes import FORMATS

BITS = [str(kind.bits) for kind in FORMATS]


def best_page(case: dict[str, Any]) -> str:
    """Return vLLM's better kernel of a case: the page size that its median is lower with."""
    names = [name for name in case["kernels"] if name.startswith("vllm-")]
    return min(names, key=lambda name: case["kernels"][name]["median"])


def ratios(case: dict[str, Any]) -> dict[str, float]:
    """Return how many times as fast as vLLM's better kernel ours are, for each format."""
    kernels = case["kernels"]
    best = kernels[best_page(case)]["median"]
    return {bits: best / kernels[bits]["median"] for bits in BITS if bits in kernels}


def means(cases: list[dict[str, Any]]) -> dict[str, float]:
    """Return the geometric mean of the ratios, for each format; cases count alike."""
    found = [ratios(case) for case in cases]
    by_bits = {bits: [r[bits] for r in found if bits in r] for bits in BITS}
    return {bits: geometric_mean(values) for bits, values in by_bits.items() if values}


def limit(run: dict[str, Any]) -> float:
    """Return the bytes a second that torch.sum read, the better of before and after."""
    return max(bandwidth.speed(found) for found in run["reads"])


def of_part(run: dict[str, Any], part: str) -> list[dict[str, Any]]:
    """Return the cases of a part."""
    return [case for case in run["cases"] if case["part"] == part]


def milliseconds(found: dict[str, Any]) -> str:
    """Write a median."""
    return f"{1e3 * found['median']:.3g}"


def gigabytes(found: dict[str, Any]) -> str:
    """Write the bytes a second at the median."""
    return f"{bandwidth.speed(found) / 1e9:.1f}"


def decode_row(case: dict[str, Any]) -> list[str]:
    """Return a row: milliseconds, GB/s, and for our formats the ratio."""
    best, kernels = best_page(case), case["kernels"]
    row = [case["shape"], f"{case['sequences']} × {case['tokens']:,}"]
    row += [milliseconds(kernels[best]), gigabytes(kernels[best]), best.removeprefix("vllm-")]
    for bits, ratio in ratios(case).items():
        row += [milliseconds(kernels[bits]), gigabytes(kernels[bits]), f"{ratio:.2f}"]
    return row


def decode_table(cases: list[dict[str, Any]]) -> str:
    """Return the table of decode, with the means in its last row."""
    header = ["heads", "tokens", "vLLM ms", "GB/s", "page"]
    last = ["geometric mean", "", "", "", ""]
    for bits, mean in means(cases).items():
        header += [f"{bits} bit ms", "GB/s", "ratio"]
        last += ["", "", f"{mean:.2f}"]
    return table.render(header, [*map(decode_row, cases), last])


def prefill_row(case: dict[str, Any]) -> list[str]:
    """Return a row: milliseconds, and for our formats the ratio."""
    best, kernels, found = best_page(case), case["kernels"], ratios(case)
    row = [case["shape"], f"{case['context']:,} + {case['queries']:,}"]
    row += [milliseconds(kernels[best]), best.removeprefix("vllm-")]
    for bits in BITS:
        known = bits in found
        row += [milliseconds(kernels[bits]), f"{found[bits]:.2f}"] if known else ["–", "–"]
    return row


def prefill_table(cases: list[dict[str, Any]]) -> str:
    """Return the table of prefill; without a context there is nothing in 8 or 4 bits."""
    header, last = ["heads", "tokens", "vLLM ms", "page"], ["geometric mean", "", "", ""]
    found = means(cases)
    for bits in BITS:
        header += [f"{bits} bit ms", "ratio"]
        last += ["", f"{found[bits]:.2f}" if bits in found else "–"]
    return table.render(header, [*map(prefill_row, cases), last])


def collapse_row(case: dict[str, Any]) -> list[str]:
    """Return a row: microseconds a token of the collapse and of attention, and their ratio."""
    kernels = case["kernels"]
    collapse = kernels["collapse"]["median"] / case["tokens"]
    attention = kernels["16"]["median"] / case["queries"]
    return [
        case["shape"],
        f"16 → {case['bits']}",
        f"{case['segment']}",
        f"{1e6 * collapse:.3f}",
        f"{1e6 * attention:.3f}",
        f"{100 * collapse / attention:.1f}",
    ]


def collapse_table(cases: list[dict[str, Any]]) -> str:
    """Return the table of collapses."""
    header = ["heads", "bits", "segment", "µs/token", "attention µs/token", "share %"]
    return table.render(header, list(map(collapse_row, cases)))


def settings(run: dict[str, Any]) -> str:
    """Say what a run was like: threads, memory pages as they really were, and how busy it was."""
    spec = run["spec"]
    shares = [found["huge"] for case in run["cases"] for found in case["kernels"].values()]
    low, high = (f"{100 * share:.0f}" for share in (min(shares), max(shares)))
    threads = f"{spec['threads']} thread{'s' * (spec['threads'] > 1)}"
    asked = "huge pages" if spec["huge"] else "small pages"
    held = f"{low} %" if low == high else f"{low} to {high} %"
    load = max(run["load"])
    return f"{threads}, {asked} ({held} of the pools' memory is in huge ones), load {load:.1f}"


EXPLAINED = {
    "decode": "Times of one layer, medians; ratio: how many times as fast as vLLM's kernel with "
    "the better of its page sizes. GB/s: bytes that must be read. "
    "torch.sum reads {limit:.1f} GB/s.",
    "prefill": "One layer, one sequence: context in cold pages + queries in hot ones; medians, and "
    "how many times as fast as vLLM's better page size.",
    "collapse": "One layer, policy entropykv, half of the tokens kept. The share is of our own "
    "attention (16 bit) of a prefill of {queries:,} tokens after {context:,}: not of a whole "
    "prefill, of which attention is a part only.",
}


def part_table(run: dict[str, Any], part: str) -> str:
    """Return the table of a part of a run, with its title and what its numbers mean."""
    cases = of_part(run, part)
    render = {"decode": decode_table, "prefill": prefill_table, "collapse": collapse_table}[part]
    spec = run["spec"]
    about = EXPLAINED[part].format(
        limit=limit(run) / 1e9, queries=spec["queries"], context=spec["collapse_context"]
    )
    return f"### {part}, {settings(run)}\n\n{about}\n\n{render(cases)}"


def summary(results: list[dict[str, Any]]) -> str:
    """Return a row a run and part: the limit, and the mean ratio of each format."""
    rows = []
    for run in results:
        for part in ("decode", "prefill"):
            if not (cases := of_part(run, part)):
                continue
            pages, found = "huge" if run["spec"]["huge"] else "small", means(cases)
            row = [part, f"{run['spec']['threads']}", pages, f"{limit(run) / 1e9:.1f}"]
            rows.append(row + [f"{found[bits]:.2f}" if bits in found else "–" for bits in BITS])
    header = ["", "threads", "pages", "torch.sum GB/s", *(f"{bits} bit ratio" for bits in BITS)]
    return "### means\n\n" + table.render(header, rows) if rows else ""


def tables(results: list[dict[str, Any]]) -> list[str]:
    """Return all texts: what it ran on, the tables of each run, and the means."""
    about = results[0]["machine"]
    isas = ", ".join(sorted(set(about["vllm isa"].values())))
    head = (
        f"{about['cpu']}, {about['cores']} cores, kernels {about['isa']}, vLLM's {isas}; "
        f"vLLM {about['vllm']}, torch {about['torch']}, {about['date']}"
    )
    found = [part_table(r, part) for r in results for part in EXPLAINED if of_part(r, part)]
    return [text for text in (head, *found, summary(results)) if text]
