# SPDX-License-Identifier: Apache-2.0
"""The script for zsh, which shows what each word is about."""

from __future__ import annotations

from collections.abc import Sequence

from entropykv_vllm.completion.tree import Command, Follows, Option

_HEAD = "(( $+functions[compdef] )) || { autoload -Uz compinit && compinit; }\n"
_TAIL = "compdef _entropykv entropykv\n"

#: What `_arguments` is told of a value: a message, and what to offer.
_VALUES: dict[Follows, str] = {
    "nothing": "",
    "word": ": : ",
    "file": ": :_files",
    "maybe file": ":: :_files",
}


def script(commands: Sequence[Command]) -> str:
    """A script for zsh: a function for each command."""
    return _HEAD + "".join(_function(command) for command in commands) + _TAIL


def _function(command: Command) -> str:
    lines = [f"{_name(command)}() {{", "    local state line; typeset -A opt_args"]
    specs = [_spec(option, name) for option in command.options for name in option.names]
    lines.append(f"    _arguments -C {' '.join([*specs, *_positions(command)])}")
    if command.inner:
        lines += _inner(command)
    return "\n".join([*lines, "}"]) + "\n"


def _positions(command: Command) -> list[str]:
    """What may stand where no option does."""
    if command.inner:
        return ["'1: :->command'", "'*:: :->inner'"]
    if command.values:
        return [_quoted(f"1: :({' '.join(command.values)})")]
    return ["'*: :_files'"]


def _inner(command: Command) -> list[str]:
    """The words of the commands that may come next, and which function goes on after each."""
    words = " ".join(_quoted(f"{i.path[-1]}:{i.about}") for i in command.inner)
    return [
        "    case $state in",
        f"    command) local -a found=({words}); _describe command found ;;",
        "    inner) case $words[1] in",
        *(f"        {i.path[-1]}) {_name(i)} ;;" for i in command.inner),
        "        esac ;;",
        "    esac",
    ]


def _spec(option: Option, name: str) -> str:
    about = "".join(f"\\{sign}" if sign in "[]:\\" else sign for sign in option.about)
    value = f": :({' '.join(option.choices)})" if option.choices else _VALUES[option.follows]
    joined = "=" if value and name.startswith("--") else ""
    return _quoted(f"({' '.join(option.names)}){name}{joined}[{about}]{value}")


def _name(command: Command) -> str:
    return "_".join(["_entropykv", *command.path])


def _quoted(text: str) -> str:
    escaped = text.replace("'", "'\\''")
    return f"'{escaped}'"
