# SPDX-License-Identifier: Apache-2.0
"""The script for fish, which shows what each word is about."""

from __future__ import annotations

from collections.abc import Sequence

from entropykv_vllm.completion.tree import Command, Follows, Option

#: -x: a value that is no file; -r: a value that may be one.
_FLAGS: dict[Follows, str] = {"nothing": "", "word": " -x", "file": " -r", "maybe file": ""}


#: Whether the line begins with some words: one of them may be an option's value further on.
_HEAD = """\
function __entropykv_at
    set -l words (commandline -opc)
    set -l last (math 1 + (count $argv))
    test "$words[2..$last]" = "$argv"
end
"""


def script(commands: Sequence[Command]) -> str:
    """A script for fish."""
    return _HEAD + "\n".join(line for command in commands for line in _lines(command)) + "\n"


def _lines(command: Command) -> list[str]:
    head = f"complete -c entropykv -n {_quoted(_when(command))}"
    return [
        *(f"{head} -f -a {i.path[-1]} -d {_quoted(i.about)}" for i in command.inner),
        *(f"{head} -f -a {_quoted(value)}" for value in command.values),
        *(f"{head}{_option(option)}" for option in command.options),
    ]


def _when(command: Command) -> str:
    """The condition under which its words are offered."""
    if not command.path:
        return "__fish_use_subcommand"
    paths = [command.path, *(found.path for found in command.inner)]
    return "; and not ".join(f"__entropykv_at {' '.join(path)}" for path in paths)


def _option(option: Option) -> str:
    names = "".join(
        f" -l {name[2:]}" if name.startswith("--") else f" -s {name[1:]}" for name in option.names
    )
    choices = f" -a {_quoted(' '.join(option.choices))}" if option.choices else ""
    about = f" -d {_quoted(option.about)}" if option.about else ""
    return f"{names}{_FLAGS[option.follows]}{choices}{about}"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
