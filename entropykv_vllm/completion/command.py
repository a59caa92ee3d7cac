# SPDX-License-Identifier: Apache-2.0
"""`entropykv completion`: a script with which a shell completes this command."""

from __future__ import annotations

import argparse

from entropykv_vllm.completion import bash, fish
from entropykv_vllm.completion.tree import commands

SHELLS = {"bash": bash.script, "zsh": bash.zsh_script, "fish": fish.script}


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    p = argparse.ArgumentParser(
        prog="entropykv completion",
        description="Print a script with which a shell completes the commands, options and values "
        "of entropykv.",
        epilog='bash: eval "$(entropykv completion bash)" in ~/.bashrc. zsh: the same with zsh, in '
        "~/.zshrc. fish: entropykv completion fish > ~/.config/fish/completions/entropykv.fish",
    )
    p.add_argument("shell", choices=SHELLS, help="the shell that is to read the script")
    return p


def main(argv: list[str] | None = None) -> int:
    """Print the script; return the exit status."""
    from entropykv_vllm import cli

    shell = parser().parse_args(argv).shell
    print(SHELLS[shell](commands(cli.parser(), cli.ELSEWHERE)), end="")
    return 0
