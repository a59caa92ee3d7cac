# SPDX-License-Identifier: Apache-2.0
"""Disks of a test's own: small ones, and some that may only be read.

They are mounted where only commands that ask for it see them, and go with the process that holds
them, so a test that is killed leaves none.
"""

from __future__ import annotations

import contextlib
import functools
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

#: How a namespace is made and entered: by root, else by a user that takes itself for root in there.
_WAYS = (
    (["unshare", "--mount"], ["nsenter", "--mount"]),
    (
        ["unshare", "--mount", "--map-root-user"],
        ["nsenter", "--mount", "--user", "--preserve-credentials"],
    ),
)


@functools.cache
def _way() -> tuple[list[str], list[str]] | None:
    """The first way that this system allows, if there is one."""
    for unshare, enter in _WAYS:
        words = [*unshare, "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
        with contextlib.suppress(FileNotFoundError):
            if subprocess.run(words, capture_output=True).returncode == 0:
                return unshare, enter
    return None


class Mounts:
    """A mount namespace, held by the process `holder`."""

    def __init__(self, holder: int, enter: list[str]) -> None:
        self.holder, self.enter = holder, enter

    def command(self, words: list[str]) -> list[str]:
        """Return the command line that runs `words` where the disks are."""
        return [*self.enter, f"--target={self.holder}", "--", *words]

    def add(self, path: Path, *options: str) -> None:
        """Mount an empty disk at `path`, with options of tmpfs."""
        path.mkdir(parents=True, exist_ok=True)
        words = ["mount", "-t", "tmpfs", "-o", ",".join(options), "tmpfs", str(path)]
        subprocess.run(self.command(words), check=True)

    def change(self, path: Path, *options: str) -> None:
        """Give the disk at `path` other options, such as another size."""
        # With its present options `mount` would repeat who owns it, which not all may say.
        alone = ["mount", "--options-source", "disable"]
        words = [*alone, "-o", ",".join(["remount", *options]), "tmpfs", str(path)]
        subprocess.run(self.command(words), check=True)

    def seen(self, path: Path) -> Path:
        """The path under which this process sees what lies at `path` there."""
        return Path(f"/proc/{self.holder}/root{path}")


@contextmanager
def mounting() -> Iterator[Mounts]:
    """Give a place for disks, which are gone when the block ends; skip the test where none may be.

    A container needs CAP_SYS_ADMIN for that, or user namespaces.
    """
    way = _way()
    if way is None:
        pytest.skip("this user may not mount disks, not even in a namespace of its own")
    words = [*way[0], "sh", "-c", "echo ready; exec cat"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"ready\n"
        try:
            yield Mounts(holder.pid, way[1])
        finally:
            holder.stdin.close()
