# SPDX-License-Identifier: Apache-2.0
"""Options that several commands share; argparse says what is wrong with a value."""

from __future__ import annotations

import json
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, TypeVar

from entropykv_vllm.config.policies import MODULES
from entropykv_vllm.errors import UsageError
from entropykv_vllm.evaluation.presets import PRESETS
from entropykv_vllm.model.fetch import NAME

T = TypeVar("T")


def words(kind: Callable[[str], T]) -> Callable[[str], list[T]]:
    """Return the type of a list with commas between its items, each of which counts once."""

    def parse(text: str) -> list[T]:
        return list(dict.fromkeys(kind(word) for word in text.split(",") if word))

    parse.__name__ = f"list of {kind.__name__}"
    return parse


def policies(text: str) -> list[str]:
    """Read names of policies, with commas between them."""
    found = words(str)(text)
    for name in found:
        if name not in MODULES:
            raise ArgumentTypeError(f"'{name}' is not a policy: choose of {', '.join(MODULES)}")
    return found


def settings(text: str) -> dict[str, Any]:
    """Read a JSON object of settings."""
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise ArgumentTypeError(f"not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise ArgumentTypeError('a JSON object of settings is wanted, such as {"window": 128}')
    if type(values.get("window", 0)) is not int:
        raise ArgumentTypeError(f"window is {values['window']!r}: a number of tokens is wanted")
    return values


def depths(text: str) -> list[float]:
    """Read two depths, from 0 to 1."""
    found = [float(word) for word in text.split(",")]
    if len(found) != 2 or not 0 <= found[0] <= found[1] <= 1:
        raise ArgumentTypeError("two numbers from 0 to 1 are wanted, the lower one first")
    return found


def check_out(folder: Path) -> None:
    """Make the folder of the results, before anything is measured.

    Raises:
        UsageError: if nothing can be written there, in one sentence.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(f"--out {folder} cannot be written: {error}") from None


def add_model(p: ArgumentParser) -> None:
    """Add the option of the model that is measured."""
    p.add_argument("--model", default=NAME, help="a model's folder (default: %(default)s, fetched)")


def add_policies(p: ArgumentParser, default: Sequence[str]) -> None:
    """Add the option of the policies that are compared."""
    p.add_argument(
        "--policies", type=policies, default=",".join(default), help="default: %(default)s"
    )


def add_config(p: ArgumentParser) -> None:
    """Add the option of settings that count for all policies and keep ratios."""
    p.add_argument(
        "--config", type=settings, default="{}", help="eviction settings for all cells, as JSON"
    )


def add_presets(p: ArgumentParser) -> None:
    """Add the options of a benchmark that serves presets with a model of random weights."""
    p.add_argument("--presets", default=",".join(PRESETS), help="default: %(default)s")
    p.add_argument("--engine", type=settings, default="{}", help="more vLLM arguments, as JSON")
