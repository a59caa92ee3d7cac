# SPDX-License-Identifier: Apache-2.0
"""Options that several commands share; argparse says what is wrong with a value."""

from __future__ import annotations

import json
import os
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, TypeVar

from entropykv_vllm.config.policies import MODULES
from entropykv_vllm.errors import UsageError
from entropykv_vllm.evaluation import engines
from entropykv_vllm.evaluation.presets import PRESETS
from entropykv_vllm.model.fetch import NAME
from entropykv_vllm.option_values import SHARE, is_number

T = TypeVar("T")


def words(kind: Callable[[str], T]) -> Callable[[str], list[T]]:
    """Return the type of a list with commas between its items, each of which counts once."""

    def parse(text: str) -> list[T]:
        found = list(dict.fromkeys(kind(word) for word in text.split(",") if word))
        if not found and is_number(kind):
            raise ArgumentTypeError("name one or more, with commas between them")
        return found

    parse.__name__ = f"list of {getattr(kind, '__name__', kind)}"
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


def readable(text: str) -> Path:
    """Read the path of a file that can be read; to find out after hours would be a pity."""
    try:
        with open(text, "rb"):
            return Path(text)
    except OSError as error:
        raise ArgumentTypeError(f"'{text}' cannot be read: {error.strerror}") from None


def new_folder(text: str) -> Path:
    """Read the path of a folder that is there, or can be made."""
    path = Path(text)
    there = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise ArgumentTypeError(f"'{text}' is no folder that can be written: {there} is in the way")
    return path


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


def check_settings(cells: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
    """Refuse eviction settings that are wrong, before anything is started.

    Args:
        cells: policies and their settings; "none" is the full cache.

    Raises:
        UsageError: one sentence that says what is wrong.
    """
    try:
        for policy, eviction in cells:
            if policy != "none":
                engines.settings(policy, eviction)
    except ValueError as error:
        raise UsageError(str(error)) from None


def add_out(p: ArgumentParser, default: str | Path, *more: str) -> None:
    """Add the option of the folder of the results.

    A default with MODEL in it depends on the model: the command works it out. `more` are other
    names of the option.
    """
    known = None if "MODEL" in str(default) else Path(default)
    p.add_argument(
        "--out",
        *more,
        type=new_folder,
        default=known,
        metavar="FOLDER",
        help=f"folder of the results; what is there already is not run again (default: {default})",
    )


def add_model(p: ArgumentParser) -> None:
    """Add the option of the model that is measured."""
    p.add_argument("--model", default=NAME, metavar="FOLDER", help=_MODEL)


def add_model_argument(p: ArgumentParser) -> None:
    """Add the same as the one argument that is no option; `--model` is taken too."""
    p.add_argument("model", nargs="?", default=NAME, metavar="MODEL", help=_MODEL)
    p.add_argument("--model", dest="named", metavar="FOLDER", help="the same")


_MODEL = "a model's folder (default: %(default)s, fetched)"


def add_text(p: ArgumentParser) -> None:
    """Add the option of the text in which facts are hidden."""
    p.add_argument(
        "--text", type=readable, metavar="FILE", help="your own text (default: the package's prose)"
    )


def add_keep(p: ArgumentParser) -> None:
    """Add the option of one keep ratio."""
    p.add_argument(
        "--keep", type=SHARE, default=0.25, metavar="SHARE", help="of the old tokens to keep"
    )


def add_policies(p: ArgumentParser, default: Sequence[str]) -> None:
    """Add the option of the policies that are compared."""
    p.add_argument(
        "--policies", type=policies, default=",".join(default), help="with commas between them"
    )


def add_config(p: ArgumentParser) -> None:
    """Add the option of settings that count for all policies and keep ratios."""
    p.add_argument(
        "--config", type=settings, default="{}", help="eviction settings for all cells, as JSON"
    )


def add_presets(p: ArgumentParser) -> None:
    """Add the options of a benchmark that serves presets with a model of random weights."""
    p.add_argument("--presets", default=",".join(PRESETS), help="with commas between them")
    p.add_argument("--engine", type=settings, default="{}", help="more vLLM arguments, as JSON")
