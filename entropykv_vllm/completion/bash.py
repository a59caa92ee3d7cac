# SPDX-License-Identifier: Apache-2.0
"""The script for bash."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from entropykv_vllm.completion.tree import Command, Option

_HEAD = """\
_entropykv() {
    local current="${COMP_WORDS[COMP_CWORD]}" previous="${COMP_WORDS[COMP_CWORD-1]}" at="" i
    # bash takes the = of --option=value for a word.
    if [ "$current" = "=" ]; then
        current=""
    elif [ "$previous" = "=" ]; then
        previous="${COMP_WORDS[COMP_CWORD-2]}"
    fi
    COMPREPLY=()
    for ((i = 1; i < COMP_CWORD; i++)); do
        case "$at ${COMP_WORDS[i]}" in
"""
_TAIL = """\
    esac
}
complete -o default -F _entropykv entropykv
"""


def script(commands: Sequence[Command]) -> str:
    """A script for bash; where it offers nothing, bash offers files."""
    paths = "|".join(shlex.quote(f" {' '.join(c.path)}") for c in commands if c.path)
    lines = [f'            {paths}) at="$at ${{COMP_WORDS[i]}}" ;;', "        esac", "    done"]
    lines.append('    case "$at $previous" in')
    lines += [line for c in commands for o in c.options for line in _value(c, o)]
    lines += ["    esac", '    case "$at" in']
    lines += [_next(c) for c in commands]
    return _HEAD + "\n".join(lines) + "\n" + _TAIL


def _at(command: Command) -> str:
    return "".join(f" {word}" for word in command.path)


def _value(command: Command, option: Option) -> list[str]:
    """What is offered after an option that takes a value."""
    if option.follows in ("nothing", "maybe file"):
        return []
    names = "|".join(shlex.quote(f"{_at(command)} {name}") for name in option.names)
    if option.choices:
        return [f"        {names}) {_offer(option.choices)}; return ;;"]
    if option.follows == "word":
        return [f"        {names}) compopt +o default 2> /dev/null; return ;;"]
    return [f"        {names}) return ;;"]


def _next(command: Command) -> str:
    words = [name for option in command.options for name in option.names]
    words = [*(inner.path[-1] for inner in command.inner), *command.values, *words]
    return f"        {shlex.quote(_at(command))}) {_offer(words)} ;;"


def _offer(words: Sequence[str]) -> str:
    return f'COMPREPLY=($(compgen -W {shlex.quote(" ".join(words))} -- "$current"))'
