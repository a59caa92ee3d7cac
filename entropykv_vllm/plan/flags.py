# SPDX-License-Identifier: Apache-2.0
"""The flags of `entropykv plan`, and what they say once read."""

from __future__ import annotations

import argparse
import json
from typing import Any

from entropykv_vllm.config.presets import PRESETS
from entropykv_vllm.config.settings import POLICIES, EvictionConfig, load, parse
from entropykv_vllm.help_text import Help
from entropykv_vllm.json_file import add_json
from entropykv_vllm.option_values import Whole
from entropykv_vllm.plan.cards import CARDS, Serving
from entropykv_vllm.plan.sizes import parse_bytes, parse_tokens
from entropykv_vllm.plan.weights import BYTES

#: What is too small is refused later, with a word on what to do.
NUMBER = Whole(-(10**7), 10**7)
ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}

#: The numbers of a model that can be given, and how its config.json calls them.
NUMBERS = {
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_size": "head_dim",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "vocab_size": "vocab_size",
    "positions": "max_position_embeddings",
}

#: Numbers that the tiers do not need, so that giving one asks about memory.
_MORE_NUMBERS = tuple(NUMBERS)[1:3] + tuple(NUMBERS)[4:]

#: Flags that only say something about a model.
_OF_A_MODEL = (
    "gpu",
    "weights",
    "answer",
    "overhead",
    "gpu_memory_utilization",
    "max_num_batched_tokens",
    "max_num_seqs",
    "kv_cache_memory_bytes",
    "tied",
    "tiers",
)


EPILOG = """\
In parentheses: what it is if the option is left out. Single settings are --config.NAME VALUE.

  entropykv plan --model Qwen/Qwen2.5-7B-Instruct --weights int4 --context 32k --gpu 8GB
  entropykv plan --config.keep 0.3 --tokens 16k
"""


def parser() -> argparse.ArgumentParser:
    """Return the command's parser. Amounts of memory and lengths are read later, as text."""
    parser = argparse.ArgumentParser(
        prog="entropykv plan",
        description="Say whether a model fits in a card, how long a context and how many requests "
        "(--model). Without a model, show the tiers of settings and what a request holds in each "
        "layer. No weights are needed.",
        epilog=EPILOG,
        formatter_class=Help,
        allow_abbrev=False,
    )
    _add_questions(parser.add_argument_group("what to plan"))
    add_settings(parser.add_argument_group("settings of the cache"))
    add_server(parser.add_argument_group("flags of the server, as vLLM has them"))
    add_numbers(parser.add_argument_group("numbers of the model, where its config.json has not"))
    return parser


def _add_questions(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--model", help="a folder, a config.json, or a name such as Qwen/Qwen2.5-7B-Instruct")
    add(
        "--context",
        "--tokens",
        dest="tokens",
        metavar="TOKENS",
        help="length of a request, its answer included: 8192, 32k (8192)",
    )
    add("--gpu", metavar="SIZE", help="a card: 8GB, 24GiB, several as 8,24, or all (all)")
    add(
        "--preset",
        choices=PRESETS,
        metavar="NAME",
        help=f"what to serve with: {', '.join(PRESETS)} (all are shown)",
    )
    add(
        "--weights",
        metavar="HOW",
        help=f"stored as {', '.join(BYTES)}, or an amount such as 5.6GB (the model's)",
    )
    add("--answer", metavar="TOKENS", help="tokens of the request that are generated (512)")
    add("--tiers", action="store_true", help="show the tiers for this model, not its memory")
    add_json(group)


def add_settings(group: argparse._ArgumentGroup) -> None:
    """Add the flags of the cache's settings."""
    add = group.add_argument
    add(
        "--policy",
        choices=POLICIES,
        metavar="NAME",
        help=f"as --kv-eviction: {', '.join(POLICIES)} (the preset's, else entropykv)",
    )
    add("--config", help="as --kv-eviction-config: a preset, a file or JSON")
    add(
        "--dtype",
        choices=ITEM_BYTES,
        default="bfloat16",
        help="of the KV cache, and of weights that are not quantized (%(default)s)",
    )
    add("--page", type=int, help="tokens per page, as --block-size (64 with 8 bits, else 32)")


def add_server(group: argparse._ArgumentGroup) -> None:
    """Add the flags of a server that decide what its card leaves."""
    add, usual = group.add_argument, Serving()
    add(
        "--gpu-memory-utilization",
        type=float,
        metavar="SHARE",
        help=f"share of the card ({usual.utilization})",
    )
    add(
        "--max-num-batched-tokens",
        type=NUMBER,
        metavar="N",
        help=f"tokens of a step ({usual.step_tokens})",
    )
    add("--max-num-seqs", type=NUMBER, metavar="N", help=f"requests of a step ({usual.requests})")
    add(
        "--kv-cache-memory-bytes",
        metavar="SIZE",
        help="memory for pages, in place of a card: bytes, or 3.26GiB",
    )
    add("--overhead", metavar="SIZE", help="for activations and CUDA (an estimate from the model)")


def add_numbers(group: argparse._ArgumentGroup) -> None:
    """Add the flags that give a model's numbers."""
    about = {
        "layers": "layers (30, without a model)",
        "heads": "query heads",
        "kv_heads": "KV heads",
        "head_size": "channels of a head (64, without a model)",
        "hidden_size": "channels of a token",
        "intermediate_size": "width of the MLP",
        "vocab_size": "words of the vocabulary",
        "positions": "tokens that the model reads at most",
    }
    for name, text in about.items():
        group.add_argument(f"--{name.replace('_', '-')}", type=NUMBER, metavar="N", help=text)
    group.add_argument(
        "--tied", action="store_true", help="one table for the vocabulary, in and out"
    )


def asks_about_memory(args: argparse.Namespace) -> bool:
    """Whether a model is named or its numbers are given.

    Raises:
        ValueError: if there is no model and a flag needs one.
    """
    if args.model is not None or any(getattr(args, name) is not None for name in _MORE_NUMBERS):
        return True
    for name in _OF_A_MODEL:
        if getattr(args, name) not in (None, False):
            raise ValueError(
                f"--{name.replace('_', '-')} needs a model: name one with --model, or give its "
                f"numbers with {', '.join('--' + key.replace('_', '-') for key in NUMBERS)}"
            )
    return False


def numbers(args: argparse.Namespace) -> dict[str, Any]:
    """The numbers given, as a config.json has them.

    Raises:
        ValueError: if there is no model to take the others from.
    """
    given = {key: getattr(args, flag) for flag, key in NUMBERS.items()}
    given = {key: value for key, value in given.items() if value is not None}
    if args.tied:
        given["tie_word_embeddings"] = True
    if args.model is not None:
        return given
    if "num_key_value_heads" not in given:
        raise ValueError("the model's KV heads are not known: give them with --kv-heads")
    if "num_attention_heads" not in given and {"hidden_size", "head_dim"} <= given.keys():
        given["num_attention_heads"] = given["hidden_size"] // given["head_dim"]
    return given


def tokens(args: argparse.Namespace, longest: int | None = None) -> int:
    """The length of the request: 8,192 if not given, or what the model reads if that is less."""
    if args.tokens is not None:
        return parse_tokens(args.tokens)
    return min(8192, longest or 8192)


def answer(args: argparse.Namespace, length: int) -> int:
    """How many tokens of a request of this length are generated."""
    if args.answer is None:
        return min(512, length)
    generated = parse_tokens(args.answer)
    if generated > length:
        raise ValueError(
            f"--answer asks for {generated:,} tokens of a request of {length:,}: its length is "
            "--context, the answer included"
        )
    return generated


def room(args: argparse.Namespace) -> int | None:
    """Bytes for pages, if they are given in place of a card."""
    given = args.kv_cache_memory_bytes
    if given is None:
        return None
    if args.gpu is not None:
        raise ValueError("--gpu and --kv-cache-memory-bytes exclude each other: leave one out")
    return parse_bytes(given, bare=1)


def weights(text: str) -> int:
    """Bytes of weights that are given as an amount."""
    try:
        return parse_bytes(text, bare=None)  # is 4 bits or GB?
    except ValueError:
        raise ValueError(
            f"'{text}' is no way to store weights: choose {', '.join(BYTES)}, or give an amount "
            "such as 5.6GB"
        ) from None


def cards(args: argparse.Namespace) -> list[int]:
    """Bytes of each card."""
    if args.gpu in (None, "all"):
        return list(CARDS)
    return [parse_bytes(card) for card in args.gpu.split(",")]


def serving(args: argparse.Namespace) -> Serving:
    """The flags of the server."""
    usual = Serving()
    share = args.gpu_memory_utilization
    utilization = usual.utilization if share is None else share
    if not 0 < utilization <= 1:
        raise ValueError(f"--gpu-memory-utilization is {utilization}, not above 0 and at most 1")
    for name in ("max_num_batched_tokens", "max_num_seqs"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} is {value}: it must be 1 or more")
    step_tokens = args.max_num_batched_tokens or usual.step_tokens
    requests = args.max_num_seqs or usual.requests
    if step_tokens < requests:
        raise ValueError(
            f"vLLM takes no fewer --max-num-batched-tokens ({step_tokens:,}) than --max-num-seqs "
            f"({requests:,}): give both"
        )
    return Serving(
        utilization=utilization,
        step_tokens=step_tokens,
        requests=requests,
        overhead=None if args.overhead is None else parse_bytes(args.overhead),
    )


def settings(args: argparse.Namespace, dotted: dict[str, Any]) -> EvictionConfig:
    """The settings of the cache that are asked about.

    Raises:
        ValueError: if they are wrong, in words.
    """
    if args.preset and args.config:
        raise ValueError("--preset and --config both name settings: leave one of them out")
    policy = args.policy or PRESETS.get(args.preset, "entropykv")
    return load(policy, {**given_settings(args), **dotted})


def given_settings(args: argparse.Namespace) -> dict[str, Any]:
    """What --preset or --config say."""
    return {"preset": args.preset} if args.preset else dict(parse(args.config))


def dotted(words: list[str], parser: argparse.ArgumentParser) -> dict[str, Any]:
    """Settings given as `--config.NAME VALUE` or `--config.NAME=VALUE`."""
    words = [p for w in words for p in (w.split("=", 1) if w.startswith("--") else [w])]
    names, values = words[::2], words[1::2]
    if len(names) != len(values) or not all(name.startswith("--config.") for name in names):
        parser.error(f"unrecognized arguments: {' '.join(words)}")
    pairs = zip(names, values, strict=True)
    return {name.removeprefix("--config."): _value(value) for name, value in pairs}


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def check_page(args: argparse.Namespace) -> None:
    """Refuse pages that are not whole tiles."""
    if args.page is not None and (args.page < 16 or args.page % 16):
        raise ValueError(f"--page is {args.page}: it must be a multiple of 16")
