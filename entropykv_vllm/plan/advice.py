# SPDX-License-Identifier: Apache-2.0
"""What to do about a card: which cache to serve with, how, and what was not counted."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from entropykv_vllm.config.policies import READ_ATTENTION
from entropykv_vllm.plan.cards import SAMPLING
from entropykv_vllm.plan.memory import FULL
from entropykv_vllm.plan.model_shape import ModelShape
from entropykv_vllm.plan.sizes import show_bytes
from entropykv_vllm.plan.weights import EXACT, weight_bytes


def verdict(report: dict[str, Any], wanted: str | None) -> tuple[str, str | None]:
    """A sentence about the one card of a report, and the cache to serve with, if one fits.

    Args:
        wanted: the cache that was asked for; None to take the mildest that fits.
    """
    fits = {fit["cache"]: fit for fit in report["cards"][0]["fits"]}
    able = [name for name, fit in fits.items() if fit["requests"] and name != FULL]
    length = f"of {report['tokens']:,} tokens"
    if wanted and not fits[wanted]["requests"]:
        other = f"with {able[0]} it does" if able else "nor with any other: shorten --context"
        return f"{wanted}: a request {length} does not fit; {other}.", able[0] if able else None
    if not able:
        return f"A request {length} does not fit with any preset: shorten --context.", None
    name = wanted or able[0]
    most = fits[name]["requests"]
    mild = "" if wanted else ", the mildest preset that fits"
    return f"{name}{mild}: {most:,} request{'s' * (most > 1)} {length} at a time.", name


def command(report: dict[str, Any], settings: Sequence[str]) -> str:
    """The command that serves this.

    Args:
        settings: the flags of eviction, and any others that were given.
    """
    words = ["vllm", "serve", report["model"], *settings, "--max-model-len", str(report["tokens"])]
    if report["cards"][0]["card_bytes"] is None:
        words += ["--kv-cache-memory-bytes", str(report["cards"][0]["room_bytes"])]
    else:
        words += ["--gpu-memory-utilization", f"{report['gpu_memory_utilization']:g}"]
    words += ["--max-num-batched-tokens", str(report["max_num_batched_tokens"])]
    words += ["--max-num-seqs", str(report["max_num_seqs"])]
    return shlex.join(words)


def notes(shape: ModelShape, report: dict[str, Any], stored: str) -> list[str]:
    """What the figures leave out or need, each in a sentence."""
    found = []
    if any(card["room_bytes"] <= 0 for card in report["cards"]):
        four = show_bytes(weight_bytes(shape, "int4"))
        cure = "" if stored == "int4" else f": --weights int4 takes {four}"
        found.append(f"On the cards with a dash, the weights do not fit{cure}.")
    if shape.vision:
        found.append(
            "The vision part of the model is not counted: serve with --language-model-only, or "
            "give the bytes of all weights with --weights."
        )
    if shape.kind not in EXACT:
        found.append(
            f"The parameters of a '{shape.kind}' are counted as a Llama's: compare them with the "
            "model's files, or give --weights an amount."
        )
    if stored in ("int4", "int8") and shape.stored is None:
        found.append(
            f"Weights in {stored} need a model that was quantized so, such as an AWQ or GPTQ one: "
            "serve that in place of this one."
        )
    if len(shape.full_layers) < shape.layers:
        found.append(
            "For layers with a sliding window vLLM counts the tokens of two steps beside the "
            "window: a smaller --max-num-batched-tokens makes room."
        )
    most = max((fit["requests"] for card in report["cards"] for fit in card["fits"]), default=0)
    if most > report["max_num_seqs"]:
        found.append(
            f"vLLM runs no more than --max-num-seqs {report['max_num_seqs']} at once; each more "
            f"takes {show_bytes(SAMPLING * shape.vocabulary)} for sampling."
        )
    return found


def policy_notes(policy: str) -> list[str]:
    """What a policy needs and the figures leave out, each in a sentence."""
    if policy not in READ_ATTENTION:
        return []
    return [
        f"{policy} reads attention: it runs on CPUs only, and the masses that it adds up are not "
        "counted."
    ]
