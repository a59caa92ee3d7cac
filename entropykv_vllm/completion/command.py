# SPDX-License-Identifier: Apache-2.0
"""`entropykv completion`: a script with which a shell completes this command."""

from __future__ import annotations

import argparse

from entropykv_vllm.completion import bash, fish, zsh
from entropykv_vllm.completion.tree import commands
from entropykv_vllm.help_text import Help

SHELLS = {"bash": bash.script, "zsh": zsh.script, "fish": fish.script}


EPILOG = """\
  eval "$(entropykv completion bash)"       in ~/.bashrc
  eval "$(entropykv completion zsh)"        in ~/.zshrc
  entropykv completion fish > ~/.config/fish/completions/entropykv.fish
"""


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    p = argparse.ArgumentParser(
        prog="entropykv completion",
        description="Print a script with which a shell completes the commands, options and values "
        "of entropykv.",
        epilog=EPILOG,
        formatter_class=Help,
        allow_abbrev=False,
    )
    p.add_argument("shell", choices=SHELLS, help="the shell that is to read the script")
    return p


def main(argv: list[str] | None = None) -> int:
    """Print the script; return the exit status."""
    from entropykv_vllm import cli

    shell = parser().parse_args(argv).shell
    print(SHELLS[shell](commands(cli.parser(), cli.ELSEWHERE)), end="")
    return 0
