# SPDX-License-Identifier: Apache-2.0
"""`entropykv quality`: how far is the next token's distribution from that of the full cache?

The engine reads texts and goes on with their own next tokens, whatever it finds likely itself, so
that all caches are asked the same. The yardstick is stock vLLM with a cache of the model's dtype.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from typing import Any

from entropykv_vllm.errors import RunError
from entropykv_vllm.evaluation import (
    cells,
    divergence,
    engines,
    identity,
    options,
    pool,
    presets,
    table,
)
from entropykv_vllm.evaluation.progress import bar, complain, onto
from entropykv_vllm.help_text import command_parser
from entropykv_vllm.json_file import add_json, show
from entropykv_vllm.option_values import COUNT, LENGTH

PRESETS = tuple(name for name, policy in presets.PRESETS.items() if policy == "entropykv")
# Named KEEP-BITS.
GRID = tuple(f"{keep:g}-{bits}" for keep in (1.0, 0.5, 0.25) for bits in (16, 8, 4))
GRID_NAME = re.compile(r"(\d(?:\.\d+)?)-(16|8|4)")
FULL = "full"
# Nothing of this one is evicted or quantized: what the dtype of the cache alone does.
UNTOUCHED = "1-16"

# Requests that share a step; results do not depend on it.
TOGETHER = 4

RECORDER = "entropykv_vllm.evaluation.recorder:Recorder"


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    p = command_parser("quality", __doc__)
    options.add_model(p)
    p.add_argument(
        "--cells",
        type=names,
        default="presets",
        help=f"presets ({', '.join(PRESETS)}), grid ({', '.join(GRID)}), or names of either, "
        "with commas between them (default: %(default)s)",
    )
    p.add_argument("--tokens", type=LENGTH, default=2048, help="prompt length")
    p.add_argument("--texts", "--prompts", type=COUNT, default=8, help="texts a cell")
    p.add_argument("--steps", type=LENGTH, default=48, help="tokens to decode")
    options.add_config(p)
    p.add_argument("--kv-cache-dtype", default="bfloat16", help="of all but the yardstick")
    options.add_out(p, "results/quality")
    add_json(p)
    return p


def names(words: str) -> list[str]:
    """Return the cells that `--cells` asks for, each once, after the untouched cache."""
    groups = {"presets": PRESETS, "grid": GRID}
    found = [name for word in words.split(",") for name in groups.get(word, (word,))]
    for name in found:
        if name not in PRESETS and not GRID_NAME.fullmatch(name):
            raise argparse.ArgumentTypeError(
                f"'{name}' is neither presets, grid, one of {', '.join(PRESETS)}, nor KEEP-BITS"
            )
    return list(dict.fromkeys([UNTOUCHED, *found]))


def eviction(name: str, config: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a cell; those of the grid are on top of `balanced`."""
    if name in PRESETS:
        return {"preset": name, **config}
    keep, bits = name.split("-")
    return {"preset": "balanced", **config, "keep": float(keep), "bits": int(bits)}


def spec(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """Return what decides the result of a cell. The pool has room for all requests together."""
    dtype = "auto" if name == FULL else args.kv_cache_dtype
    shape = pool.shape(engines.model_folder(args.model), "float32" if dtype == "auto" else dtype)
    length = args.tokens + args.steps
    return {
        "name": name,
        "policy": "none" if name == FULL else "entropykv",
        "eviction": {} if name == FULL else eviction(name, args.config),
        "model": args.model,
        **identity.marks(args.model),
        "tokens": args.tokens,
        "texts": args.texts,
        "steps": args.steps,
        "yardstick": str(args.out / f"{FULL}.npy"),
        "engine": {
            "max_model_len": length,
            "max_num_seqs": TOGETHER,
            "enforce_eager": True,
            "kv_cache_dtype": dtype,
            "kv_cache_memory_bytes": pool.pool_bytes(shape, (TOGETHER + 1) * length),
            "logits_processors": [RECORDER],
        },
    }


def title(spec: dict[str, Any]) -> list[str]:
    """Return a cell's name, keep ratio, bits and dtype as the table has them."""
    from entropykv_vllm.config.settings import load

    dtype = spec["engine"]["kv_cache_dtype"].replace("auto", "float32")
    if spec["policy"] == "none":
        return ["full cache", "1", "", dtype]
    config = load("entropykv", spec["eviction"])
    name = {UNTOUCHED: "full cache"}.get(spec["name"], spec["name"])
    return [name, f"{config.keep:g}", str(config.bits), dtype]


HEADER = ["cell", "keep", "bits", "cache", "KL in nats (95 %)", "same top token % (95 %)"]


def rows(results: list[dict[str, Any]]) -> list[list[str]]:
    """Return the rows of the table."""
    return [
        [*title(r["spec"]), divergence.nats(r["kl"]), table.interval(r["top1"])] for r in results
    ]


def measure(args: argparse.Namespace) -> tuple[list[dict[str, Any]], int]:
    """Run all cells, the full cache first; return results, and how many failed and are left out."""
    wanted = [FULL, *args.cells]
    if not (args.out / f"{FULL}.npy").is_file():
        (args.out / f"{FULL}.json").unlink(missing_ok=True)
    results = []
    with bar(len(wanted) * args.texts, "text") as shown:
        for i, name in enumerate(wanted):
            shown.set_description(name)
            progress = onto(shown, i * args.texts)
            try:
                results.append(run(args, name, progress))
            except RunError as error:
                if name == FULL:
                    raise
                complain(str(error))
            progress(args.texts, args.texts)
    return results, len(wanted) - len(results)


def run(args: argparse.Namespace, name: str, progress: Any) -> dict[str, Any]:
    """Return the result of one cell."""
    module = "entropykv_vllm.evaluation.quality_cell"
    return cells.run(module, spec(args, name), args.out / f"{name}.json", progress)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    args = parser().parse_args(argv)
    engines.check_length(args.model, args.tokens, args.steps, "the steps")
    options.check_settings(("entropykv", eviction(name, args.config)) for name in args.cells)
    options.check_out(args.out)
    results, failed = measure(args)
    text = table.render(HEADER, rows(results))
    title = f"{args.steps} tokens after {args.tokens}, {args.texts} texts a cell"
    (args.out / "table.md").write_text(text + "\n")
    summary = [divergence.brief(r) for r in results]
    (args.out / "table.json").write_text(json.dumps(summary, indent=1) + "\n")
    show(f"\n{title}\n\n{text}", summary, args.json)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
