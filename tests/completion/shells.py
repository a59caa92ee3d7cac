# SPDX-License-Identifier: Apache-2.0
"""What zsh and fish offer for a line, asked of the shells themselves."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import shlex
import struct
import subprocess
import termios
from pathlib import Path

PATIENCE = 30  # seconds
_LIST, _CLEAR = b"\x14", b"\x15"
_DONE = re.compile(rb"\nDONE\n.*@@", re.DOTALL)
_SETUP = """\
PROMPT=@@ PS2= LISTMAX=9999
autoload -Uz compinit && compinit -u -D
source {script}
bindkey '^T' list-choices
"""


def fish(script: Path, line: str, folder: Path) -> set[str]:
    """The words that fish offers for the last one of a line."""
    ask = f"source {shlex.quote(str(script))}; complete -C {shlex.quote(line)}"
    command = ["fish", "--no-config", "-c", ask]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder)
    assert done.stderr == ""
    return {row.split("\t")[0] for row in done.stdout.splitlines()}


class Zsh:
    """An interactive zsh in a terminal of its own, which lists what it would complete."""

    def __init__(self, script: Path, folder: Path) -> None:
        """`folder` is where it stands."""
        self.child, self.terminal = pty.fork()
        if self.child == 0:
            os.chdir(folder)
            os.execvpe("zsh", ["zsh", "-f", "-i"], {**os.environ, "TERM": "dumb"})
        fcntl.ioctl(self.terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 500, 250, 0, 0))
        self._until(re.compile(rb"[%#] "))
        for line in _SETUP.format(script=shlex.quote(str(script))).splitlines():
            self._run(line.encode())

    def offered(self, line: str) -> set[str]:
        """The words that are offered for the last one of a line."""
        said = self._run(line.encode() + _LIST + _CLEAR)
        listed = [row for row in said.split("\n")[1:] if not row.startswith("@@")]
        return {word for row in listed for word in row.split(" -- ")[0].split()}

    def close(self) -> None:
        """End it."""
        os.close(self.terminal)
        os.waitpid(self.child, 0)

    def _run(self, keys: bytes) -> str:
        """Type keys, then a command that says that they were read; what was shown by then."""
        os.write(self.terminal, keys + (b"" if _LIST in keys else b"\n") + b"echo DO''NE\n")
        return self._until(_DONE).split(b"echo DO")[0].decode()

    def _until(self, end: re.Pattern[bytes]) -> bytes:
        """Read until `end` is shown; a shell that still works at a line reads no keys."""
        shown = b""
        while not end.search(shown):
            ready, _, _ = select.select([self.terminal], [], [], PATIENCE)
            assert ready, shown
            shown += os.read(self.terminal, 1 << 16).replace(b"\r", b"")
        return shown
