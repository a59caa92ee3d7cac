# SPDX-License-Identifier: Apache-2.0
"""`--json`, which all commands with a table spell alike: the same for programs."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from entropykv_vllm.errors import RunError

#: In place of a file: standard output.
STDOUT = "-"


def add_json(to: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Add the option; `args.json` is None without it."""
    to.add_argument(
        "--json",
        type=_path,
        nargs="?",
        const=STDOUT,
        metavar="FILE",
        help="write all numbers to a file; - or no FILE prints them, and nothing else",
    )


def _path(text: str) -> Path:
    """A file's path; measuring for hours, then to find that it is none, would be a pity."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"'{text}' is no file in a folder that there is")
    if text != STDOUT and not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"'{text}' cannot be written")
    return path


def takes_stdout(path: Path | None) -> bool:
    """Whether standard output is for JSON alone."""
    return path is not None and str(path) == STDOUT


def show(text: str, report: Any, path: Path | None) -> None:
    """Print a text, unless JSON takes its place, and write the JSON that was asked for.

    Args:
        text: what people read.
        report: the same, of values that JSON has.
        path: `args.json`.

    Raises:
        RunError: the file cannot be written, in words.
    """
    if not takes_stdout(path):
        print(text)
    if path is not None:
        write(report, path)


def write(report: Any, path: Path) -> None:
    """Write a report to a file, or print it.

    Raises:
        RunError: the file cannot be written, in words.
    """
    numbers = json.dumps(report, indent=2)
    if takes_stdout(path):
        print(numbers)
        return
    try:
        path.write_text(numbers + "\n")
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error.strerror}") from None
