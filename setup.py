# SPDX-License-Identifier: Apache-2.0
"""Adds the repository's `configs/` and `csrc/` to the package; the rest is in pyproject.toml.

In a wheel they lie in the package's folder, as `entropykv_vllm/configs` and `entropykv_vllm/csrc`.
An editable install leaves them where they are, one level above the package.
"""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

DATA = {
    "configs": ("*.yaml",),
    "csrc": ("*.cpp", "*.h", "*.hpp", "*.cu", "*.cuh"),
}


class BuildWithData(build_py):
    """setuptools' `build_py`, which also copies DATA."""

    def run(self) -> None:
        """Copies the package and then, unless the install is an editable one, the data."""
        super().run()
        if self.editable_mode:
            return
        for source, target in self._data():
            self.mkpath(str(target.parent))
            self.copy_file(str(source), str(target), preserve_mode=False)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        """The files that the build makes; bdist_wheel and install rely on it."""
        data = [] if self.editable_mode else [str(target) for _, target in self._data()]
        return super().get_outputs(include_bytecode) + data

    def _data(self) -> list[tuple[Path, Path]]:
        package = Path(self.build_lib) / "entropykv_vllm"
        return [
            (path, package / path)
            for folder, patterns in DATA.items()
            for pattern in patterns
            for path in sorted(Path(folder).rglob(pattern))
        ]


setup(cmdclass={"build_py": BuildWithData})
