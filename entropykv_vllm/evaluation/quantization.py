# SPDX-License-Identifier: Apache-2.0
"""`entropykv quantization`: what do ways to store keys and values in 4 or 8 bits lose?

A simulation outside vLLM: transformers reads a text, the old part of its cache is replaced by what
is left of it after quantization, and the text goes on. Nothing is evicted.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from entropykv_vllm.errors import UsageError
from entropykv_vllm.evaluation import corpus, divergence, engines, options, passages, table
from entropykv_vllm.evaluation.progress import bar
from entropykv_vllm.evaluation.variants import VARIANTS, Variant
from entropykv_vllm.help_text import command_parser
from entropykv_vllm.json_file import add_json, show
from entropykv_vllm.option_values import COUNT, LENGTH, Whole

HEADER = [
    "keys",
    "values",
    "bits",
    "bytes / 16 bit",
    "KL in nats (95 %)",
    "same top token % (95 %)",
]


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    p = command_parser("quantization", __doc__)
    options.add_model(p)
    p.add_argument("--tokens", type=LENGTH, default=2048, help="prompt length")
    p.add_argument("--window", type=Whole(0), default=128, help="newest tokens left as they are")
    p.add_argument("--texts", type=COUNT, default=8, help="how many")
    p.add_argument("--steps", type=LENGTH, default=48, help="tokens to go on with")
    options.add_out(p, "results/quantization")
    add_json(p)
    return p


def load(folder: str) -> tuple[Any, Any]:
    """Return the tokenizer and the model in float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()  # that of loading weights, a few seconds
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return AutoTokenizer.from_pretrained(folder), model.eval()


def read(model: Any, ids: list[int]) -> list[tuple[Any, Any]]:
    """Return each layer's keys and values `[1, heads, tokens, head_size]` of a prompt."""
    import torch

    with torch.inference_mode():
        output = model(torch.tensor([ids]), use_cache=True, logits_to_keep=1)
    return [(layer.keys, layer.values) for layer in output.past_key_values.layers]


def go_on(model: Any, layers: list[tuple[Any, Any]], ids: list[int]) -> Any:
    """Return the log-probabilities `[steps, vocabulary]` after each of the next tokens."""
    import torch
    from transformers import DynamicCache

    cache = DynamicCache()
    with torch.inference_mode():
        for index, (keys, values) in enumerate(layers):
            cache.update(keys, values, index)
        output = model(torch.tensor([ids]), past_key_values=cache)
    return output.logits[0].float().log_softmax(-1)


def head_size(model: Any) -> int:
    """Return the channels of a head."""
    config = model.config
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Compare all variants on all texts; each text is read once."""
    engines.load_tokenizer(args.model)  # which says what is wrong in a sentence
    tokenizer, model = load(engines.model_folder(args.model))
    found: list[list[dict[str, list[float]]]] = [[] for _ in VARIANTS]
    book, first = corpus.encode(tokenizer), passages.opening(tokenizer)
    texts = passages.cut(book, args.texts, args.tokens + args.steps, first)
    with bar(len(texts) * len(VARIANTS), "variant") as shown:
        for ids in texts:
            layers = read(model, ids[: args.tokens])
            full = go_on(model, layers, ids[args.tokens :])
            for variant, values in zip(VARIANTS, found, strict=True):
                lossy = [variant.replace_old(*layer, args.window) for layer in layers]
                values.append(divergence.compare(full, go_on(model, lossy, ids[args.tokens :])))
                shown.update()
    return [
        result(variant, values, head_size(model))
        for variant, values in zip(VARIANTS, found, strict=True)
    ]


def result(variant: Variant, texts: list[dict[str, list[float]]], size: int) -> dict[str, Any]:
    """Return what was found of one variant."""
    return {
        "keys": str(variant.keys),
        "values": str(variant.values),
        "bits": variant.bits,
        "bytes": variant.share(size),
        **divergence.summary(texts),
        "texts": texts,
    }


def rows(results: list[dict[str, Any]]) -> list[list[str]]:
    """Return the rows of the table."""
    return [
        [
            r["keys"],
            r["values"],
            str(r["bits"]),
            f"{r['bytes']:.3f}",
            divergence.nats(r["kl"]),
            table.interval(r["top1"]),
        ]
        for r in results
    ]


def check(args: argparse.Namespace) -> None:
    """Refuse texts that are too long for the model, and those without an old part."""
    engines.check_length(args.model, args.tokens, args.steps, "the steps")
    if not 0 <= args.window < args.tokens:
        raise UsageError(f"--window {args.window}: nothing of {args.tokens} tokens would be old")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    args = parser().parse_args(argv)
    check(args)
    options.check_out(args.out)
    results = measure(args)
    text = table.render(HEADER, rows(results))
    title = (
        f"{args.steps} tokens after {args.tokens}, the last {args.window} of them untouched, "
        f"{args.texts} texts"
    )
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "table.md").write_text(text + "\n")
    settings = {name: str(value) for name, value in vars(args).items() if name != "json"}
    report = {"settings": settings, "variants": results}
    (args.out / "table.json").write_text(json.dumps(report, indent=1) + "\n")
    show(f"\n{title}\n\n{text}", report, args.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
