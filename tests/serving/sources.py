# SPDX-License-Identifier: Apache-2.0
"""vLLM's sources, read and not imported, since much of them runs on GPUs only."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import sys
from functools import cache
from pathlib import Path

import pytest

from entropykv_vllm.version import SUPPORTED_VLLM

#: Names a folder with another unpacked `vllm` package, to read in place of those supported.
OTHER = os.environ.get("ENTROPYKV_VLLM_SOURCES")
RELEASES = [OTHER] if OTHER else SUPPORTED_VLLM


class Sources:
    """The modules of one release, by their names without the leading `vllm.`."""

    def __init__(self, package: Path) -> None:
        self.package = package
        written = re.search(
            r"__version__ = version = '(.+)'", (package / "_version.py").read_text()
        )
        self.number = written[1] if written else "of an unknown version"
        self.version = f"vLLM {self.number}"

    @cache  # noqa: B019 (there are two)
    def source(self, module: str) -> str:
        return (self.package / f"{module.replace('.', '/')}.py").read_text()

    @cache  # noqa: B019
    def tree(self, module: str) -> ast.Module:
        return ast.parse(self.source(module))

    def members(self, module: str, path: str) -> dict[str, ast.AST]:
        """What a module or a class of it defines, by name."""
        node: ast.AST = self.tree(module)
        for name in filter(None, path.split(".")):
            node = _named(node)[name]
        return _named(node)

    def definition(self, module: str, path: str):
        """A function or class; the sentence that fails if it is gone."""
        *owner, name = path.split(".")
        found = self.members(module, ".".join(owner)).get(name)
        assert found is not None, f"{self.version} has no {path} in vllm.{module}"
        return found

    def parameters(self, module: str, path: str) -> list[str]:
        arguments = self.definition(module, path).args
        return [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]

    def text(self, module: str, path: str) -> str:
        """The source of a function or class, with whitespace as single blanks."""
        found = ast.get_source_segment(self.source(module), self.definition(module, path))
        assert found is not None
        return " ".join(found.split())

    def says(self, module: str, path: str, *parts: str) -> None:
        """Assert that parts stand in a function, in this order."""
        whole, at = self.text(module, path), 0
        for part in parts:
            found = whole.find(part, at)
            where = f"vllm.{module}:{path}"
            assert found >= 0, f"{self.version} no longer says {part!r} (there) in {where}"
            at = found + len(part)


def _named(node) -> dict[str, ast.AST]:
    found: dict[str, ast.AST] = {}
    for child in node.body:
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found[child.name] = child
        elif isinstance(child, ast.AnnAssign):
            found[child.target.id] = child
        elif isinstance(child, ast.Assign) and isinstance(child.targets[0], ast.Name):
            found[child.targets[0].id] = child
    return found


def _installed() -> Sources:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.submodule_search_locations
    return Sources(Path(spec.submodule_search_locations[0]))


@cache
def sources(release: str) -> Sources:
    """Those of a release that is supported (or of `OTHER`): installed, or fetched by make."""
    if release == OTHER:
        return Sources(Path(release) / "vllm")
    if (found := _installed()).number.startswith(f"{release}."):
        return found
    package = Path(sys.prefix) / f"vllm-{release}" / "vllm"
    if not package.is_dir():
        pytest.skip(f"the sources of vLLM {release} are not here: run 'make vllm-sources'")
    found = Sources(package)
    assert found.number.startswith(f"{release}.")
    return found
