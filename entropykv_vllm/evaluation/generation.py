# SPDX-License-Identifier: Apache-2.0
"""`entropykv generation`: does a fact survive what a model generates after it?

A short prompt holds a number, 1,500 tokens of text are decoded after it (the same for all: they are
forced), with another number near their end, and one of the two is asked for.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from entropykv_vllm.evaluation import cells, engines, identity, options, pool, scoring, table
from entropykv_vllm.evaluation.generation_cell import ANSWER_TOKENS
from entropykv_vllm.evaluation.progress import bar, onto
from entropykv_vllm.help_text import command_parser
from entropykv_vllm.json_file import add_json, show
from entropykv_vllm.option_values import COUNT, LENGTH

TOGETHER = 16


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    p = command_parser("generation", __doc__)
    options.add_model(p)
    options.add_policies(p, ("entropykv", "norm", "h2o", "snapkv", "sink"))
    options.add_keep(p)
    p.add_argument("--prompt", type=LENGTH, default=160, help="tokens of the prompt")
    p.add_argument("--generated", type=LENGTH, default=1500, help="tokens decoded after it")
    p.add_argument("--texts", type=COUNT, default=40, help="texts, each asked both ways")
    options.add_config(p)
    options.add_out(p, "results/generation")
    add_json(p)
    return p


def eviction(args: argparse.Namespace, policy: str) -> dict[str, Any]:
    """Return the eviction settings of a policy."""
    return engines.eviction(policy, args.keep, args.prompt + args.generated, args.config)


def spec(args: argparse.Namespace, policy: str) -> dict[str, Any]:
    """Return what decides the result of a cell."""
    length = args.prompt + args.generated + 64
    room = pool.pool_bytes(pool.shape(engines.model_folder(args.model)), (TOGETHER + 1) * length)
    return {
        "policy": policy,
        "eviction": {} if policy == "none" else eviction(args, policy),
        "model": args.model,
        **identity.marks(args.model),
        "prompt": args.prompt,
        "generated": args.generated,
        "texts": args.texts,
        "engine": {
            "max_model_len": length,
            "max_num_seqs": TOGETHER,
            "enforce_eager": True,
            "kv_cache_memory_bytes": room,
            "logits_processors": ["entropykv_vllm.evaluation.recorder:Recorder"],
        },
    }


def brief(result: dict[str, Any]) -> dict[str, Any]:
    """Return a cell's shares of right answers, with their 95 % intervals, without its answers."""
    found: dict[str, Any] = {"spec": result["spec"], "seconds": result["seconds"]}
    for side in ("early", "recent"):
        right = [
            scoring.exact(a["answer"], a[side]) for a in result["answers"] if a["asked"] == side
        ]
        found[side] = [sum(right) / len(right), *scoring.wilson(sum(right), len(right))]
    return found


def row(result: dict[str, Any]) -> list[str]:
    """Return a cell's row of the table."""
    found = brief(result)
    name = found["spec"]["policy"].replace("none", "full cache")
    sides = (table.interval(found[side]) for side in ("early", "recent"))
    return [name, *sides, f"{found['seconds']:.0f}"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    args = parser().parse_args(argv)
    engines.check_length(args.model, args.prompt + args.generated, 64 + ANSWER_TOKENS, "the answer")
    options.check_settings((policy, eviction(args, policy)) for policy in args.policies)
    options.check_out(args.out)
    results = []
    for policy in ("none", *args.policies):
        with bar(2 * args.texts, "answer", policy) as shown:
            results.append(
                cells.run(
                    "entropykv_vllm.evaluation.generation_cell",
                    spec(args, policy),
                    args.out / f"{policy}.json",
                    onto(shown),
                )
            )
    text = table.render(
        ["policy", "early fact % (95 %)", "recent fact % (95 %)", "seconds"],
        [row(r) for r in results],
    )
    title = f"{args.generated} tokens decoded after {args.prompt}, keep {args.keep:g}"
    (args.out / "table.md").write_text(text + "\n")
    show(f"\n{title}\n\n{text}", [brief(r) for r in results], args.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
