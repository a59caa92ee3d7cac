# SPDX-License-Identifier: Apache-2.0
"""`entropykv doctor`: each check's states, and a real look at this machine."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import venv
from importlib.util import find_spec
from pathlib import Path

import pytest

import entropykv_vllm
from entropykv_vllm import cli
from entropykv_vllm.doctor import command, engine, extras, machine
from entropykv_vllm.doctor.check import Check
from entropykv_vllm.model import fetch
from entropykv_vllm.version import SUPPORTED_VLLM

GOOD: engine.Probed = {
    "vllm": {"version": f"{SUPPORTED_VLLM[0]}.1"},
    "plugin": {},
    "worker": {"worker": "EvictionCPUWorker", "platform": "RayCpuPlatform", "device": "cpu"},
    "kernels": {"built": True, "isa": "avx2", "supported": ["generic", "avx2"]},
    "cuda": {"gpu": None, "loaded": False},
    "pages": {"allowed": True, "asked": 32 << 20, "given": 30 << 20},
}


def probed(**parts: dict) -> engine.Probed:
    """What `probe` finds where all is well, but for some parts."""
    return {**copy.deepcopy(GOOD), **parts}


def by_name(found: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in found}


def test_a_good_process_is_ok(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    found = engine.checks(probed())
    assert [check.state for check in found] == ["ok"] * len(found)
    assert not any(check.advice for check in found)


@pytest.mark.parametrize(
    ("parts", "name", "state"),
    [
        ({"vllm": {"version": "0.31.0"}}, "vLLM", "fail"),
        ({"vllm": {"version": "0.3.0"}}, "vLLM", "fail"),
        ({"vllm": {"error": "ImportError: no"}}, "vLLM", "fail"),
        ({"plugin": {"error": "ImportError: no"}}, "plugin", "fail"),
        ({"worker": {"error": "ImportError: no"}}, "worker", "fail"),
        (
            {"worker": {"worker": "EvictionCPUWorker", "platform": "X", "device": "xpu"}},
            "worker",
            "fail",
        ),
        ({"kernels": {"built": False}}, "kernels", "warn"),
        ({"kernels": {"built": True, "isa": "generic", "supported": []}}, "kernels", "warn"),
        ({"kernels": {"error": "ModuleNotFoundError: no torch"}}, "kernels", "fail"),
        ({"cuda": {"gpu": "H100", "loaded": False}}, "CUDA kernels", "warn"),
        ({"cuda": {"gpu": "H100", "loaded": True}}, "CUDA kernels", "ok"),
    ],
)
def test_what_the_process_lacks_is_told(parts: dict, name: str, state: str) -> None:
    check = by_name(engine.checks(probed(**parts)))[name]
    assert check.state == state
    assert bool(check.advice) == (state != "ok")


def test_a_plugin_that_is_not_allowed_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    assert engine.entries().state == "fail"
    monkeypatch.setenv("VLLM_PLUGINS", "other,entropykv")
    assert engine.entries().state == "ok"
    monkeypatch.setattr(engine, "entry_points", lambda **_: ())
    assert "vllm.general_plugins" in engine.entries().found


def test_on_a_gpu_the_systems_memory_and_threads_are_left_out() -> None:
    gpu = {"worker": "EvictionGPUWorker", "platform": "CudaPlatform", "device": "cuda"}
    assert machine.checks(probed(worker=gpu)) == []
    slow = probed(worker=gpu, kernels={"built": False})
    assert engine.kernels(slow).state == "ok"


@pytest.mark.parametrize(
    ("environment", "state"),
    [
        ({"OMP_NUM_THREADS": "4", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}, "ok"),
        ({"OMP_NUM_THREADS": "3", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}, "warn"),
        ({"VLLM_CPU_OMP_THREADS_BIND": "nobind"}, "warn"),
        ({"OMP_NUM_THREADS": "4"}, "warn"),
        ({"VLLM_CPU_OMP_THREADS_BIND": "0-2"}, "ok"),
    ],
)
def test_threads(environment: dict[str, str], state: str) -> None:
    assert machine.threads(environment, 4).state == state


@pytest.mark.parametrize(
    ("given", "state"),
    [(None, "warn"), ("4", "ok"), ("9", "fail"), ("0", "fail"), ("1.5", "fail"), ("x", "fail")],
)
def test_space(given: str | None, state: str) -> None:
    environment = {} if given is None else {"VLLM_CPU_KVCACHE_SPACE": given}
    check = machine.space(environment, 8 << 30)
    assert check.state == state
    assert ("such as 4" in check.advice) == (state != "ok")


@pytest.mark.parametrize(
    ("pages", "state"),
    [
        ({"allowed": False, "asked": 100, "given": 0}, "warn"),
        ({"allowed": True, "asked": 100, "given": 49}, "warn"),
        ({"allowed": True, "asked": 100, "given": 50}, "ok"),
        ({"error": "OSError: no"}, "warn"),
    ],
)
def test_huge_pages(pages: dict, state: str) -> None:
    assert machine.huge_pages(probed(pages=pages)).state == state


@pytest.mark.parametrize(
    ("number", "platform", "state"),
    [
        ("2.60.0", "RayCpuPlatform", "ok"),
        ("2.9.3", "RayCpuPlatform", "warn"),
        ("2.60.0", "CpuPlatform", "warn"),
    ],
)
def test_ray(number: str, platform: str, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "version", lambda _: number)
    check = extras.ray(probed(worker={**GOOD["worker"], "platform": platform}))
    assert (check.state, number in check.found) == (state, True)


def test_the_small_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENTROPYKV_CACHE", str(tmp_path))
    assert "not in the cache" in extras.model().found
    (tmp_path / fetch.NAME).mkdir()
    assert "not as it was built" in extras.model().found
    monkeypatch.setattr(extras, "is_ready", lambda _: True)
    assert extras.model().state == "ok"
    monkeypatch.setenv("ENTROPYKV_CACHE", "~there-is-no-such-user/models")
    assert "no home folder" in extras.model().found


@pytest.mark.parametrize(("state", "status"), [("ok", 0), ("warn", 0), ("fail", 1)])
def test_the_status_says_whether_a_server_would_run(
    state: str, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [Check("one", "ok", "fine"), Check("two", state, "seen", "Do it.")]  # type: ignore[arg-type]
    monkeypatch.setattr(command, "look", lambda: found)
    assert cli.main(["doctor"]) == status
    said = capsys.readouterr().out
    assert f"two    {state}" in said
    assert "two: Do it." in said
    assert cli.main(["doctor", "--json"]) == status
    report = json.loads(capsys.readouterr().out)
    assert report["ready"] == (status == 0)
    assert report["checks"][1] == {
        "name": "two",
        "state": state,
        "found": "seen",
        "advice": "Do it.",
    }


def test_a_process_that_dies_is_a_fail_of_what_it_was_to_show(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine.sys, "executable", "/bin/false")
    found = engine.checks(engine.probe())
    failed = [check for check in found if check.state == "fail"]
    assert {"vLLM", "plugin", "worker"} <= by_name(failed).keys()
    assert "exit status 1" in failed[0].found


def run(python: str, environment: dict[str, str]) -> tuple[int, dict[str, dict]]:
    """Run the command as a user does; its status, and its checks by name."""
    done = subprocess.run(
        [python, "-m", "entropykv_vllm", "doctor", "--json"],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    return done.returncode, {c["name"]: c for c in json.loads(done.stdout)["checks"]}


@pytest.mark.slow
def test_this_machine() -> None:
    status, found = run(sys.executable, {"VLLM_CPU_KVCACHE_SPACE": "1"})
    assert status == 0
    for name in ("vLLM", "entry points", "plugin", "worker"):
        assert found[name]["state"] == "ok", found[name]
    assert found["kernels"]["found"].startswith("native, ")


@pytest.mark.slow
def test_a_plugin_that_vllm_may_not_load_is_seen_in_the_worker() -> None:
    status, found = run(sys.executable, {"VLLM_PLUGINS": "other", "VLLM_CPU_KVCACHE_SPACE": "1"})
    assert status == 1
    assert found["plugin"]["state"] == found["entry points"]["state"] == "fail"


def test_without_vllm_it_says_to_install_it(tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=False)
    needed = tmp_path / "needed"
    needed.mkdir()
    for name in ("pydantic", "pydantic_core", "annotated_types", "typing_inspection", "yaml"):
        (origin := find_spec(name)) and (needed / name).symlink_to(Path(origin.origin).parent)
    (needed / "typing_extensions.py").symlink_to(find_spec("typing_extensions").origin)
    home = Path(entropykv_vllm.__file__).parents[1]
    environment = {"PYTHONPATH": f"{home}:{needed}"}
    status, found = run(str(tmp_path / "venv/bin/python"), environment)
    assert status == 1
    assert found["vLLM"]["state"] == "fail"
    assert found["vLLM"]["advice"].startswith("Install vLLM 0.")
