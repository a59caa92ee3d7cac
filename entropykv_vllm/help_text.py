# SPDX-License-Identifier: Apache-2.0
"""How `--help` of every command reads."""

from __future__ import annotations

import argparse
import re
from itertools import groupby


class Help(argparse.HelpFormatter):
    """Wraps text but for lines that begin with a space, as examples do, and says all defaults."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        parts = []
        for kind, lines in groupby(text.splitlines(), _kind):
            if kind == "text":
                parts.append(super()._fill_text(" ".join(lines), width, indent))
            else:
                parts += [f"{indent}{line}" for line in lines]
        return "\n".join(parts)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text = action.help
        silent = action.default in (None, False, "", "{}", [], argparse.SUPPRESS)
        if text is None or silent or "default" in text:
            return text
        return f"{text} (default: %(default)s)"


def _kind(line: str) -> str:
    return "as it is" if line.startswith(" ") or not line else "text"


def command_parser(
    name: str, doc: str | None, epilog: str | None = None
) -> argparse.ArgumentParser:
    """Return the parser of a command without its options.

    Args:
        name: of the command.
        doc: of its module, which begins with "`entropykv NAME`: " and says what the command does.
        epilog: what follows the options; lines that begin with a space are left as they are.
    """
    about = re.sub(r"^`entropykv [a-z -]+`: ", "", doc or "").strip()
    return argparse.ArgumentParser(
        prog=f"entropykv {name}",
        description=about[:1].upper() + about[1:],
        epilog=epilog,
        formatter_class=Help,
        allow_abbrev=False,
    )
