# SPDX-License-Identifier: Apache-2.0
"""What can follow what on the command line, out of the argument parsers themselves."""

from __future__ import annotations

import argparse
import importlib
from dataclasses import dataclass, field
from typing import Literal

from entropykv_vllm.option_values import is_number

#: What follows an option.
Follows = Literal["nothing", "word", "file", "maybe file"]


@dataclass(frozen=True)
class Option:
    """An option of a command.

    Attributes:
        names: all ways to spell it.
        about: its help, in one line.
        follows: what kind of value it takes.
        choices: the values, if they are known.
    """

    names: tuple[str, ...]
    about: str
    follows: Follows
    choices: tuple[str, ...] = ()


@dataclass
class Command:
    """A command: the words before its options, what it does, and what may come next.

    Attributes:
        path: the words that name it; none for `entropykv` itself.
        about: what it does, in one line.
        options: of it.
        values: of its first argument that is no option, if they are known.
        inner: the commands that may follow it, each also a command of its own.
    """

    path: tuple[str, ...]
    about: str
    options: list[Option] = field(default_factory=list)
    values: tuple[str, ...] = ()
    inner: list[Command] = field(default_factory=list)


def commands(top: argparse.ArgumentParser, elsewhere: dict[str, tuple[str, str]]) -> list[Command]:
    """All commands, each after the one that it is part of.

    Args:
        top: the parser of the whole command.
        elsewhere: name -> (module whose `parser()` reads it, what it does).
    """
    found = _command((), "", top)
    for inner in found.inner:
        name = inner.path[-1]
        if name in elsewhere and (parser := _parser(elsewhere[name][0])) is not None:
            whole = _command(inner.path, inner.about, parser)
            inner.options, inner.values = whole.options, whole.values
    return _flat(found)


def _parser(module: str) -> argparse.ArgumentParser | None:
    """A command's parser; None if what the command needs, such as torch, is missing."""
    try:
        found: argparse.ArgumentParser = importlib.import_module(module).parser()
    except ImportError:
        return None
    return found


def _flat(command: Command) -> list[Command]:
    return [command, *(found for inner in command.inner for found in _flat(inner))]


def _command(path: tuple[str, ...], about: str, parser: argparse.ArgumentParser) -> Command:
    found = Command(path, about)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
            found.inner = [
                _command((*path, name), helps.get(name, ""), inner)
                for name, inner in action.choices.items()
            ]
        elif action.option_strings:
            found.options.append(_option(action))
        elif action.choices and not found.values:
            found.values = tuple(map(str, action.choices))
    return found


def _option(action: argparse.Action) -> Option:
    about = (action.help or "") % {**vars(action), "prog": ""}
    choices = tuple(map(str, action.choices or ()))
    return Option(tuple(action.option_strings), " ".join(about.split()), _follows(action), choices)


def _follows(action: argparse.Action) -> Follows:
    if action.nargs == 0:
        return "nothing"
    if action.nargs == "?":
        return "maybe file"
    # A text may be the name of a file, such as --config's; a number is none.
    return "word" if action.choices or is_number(action.type) else "file"
