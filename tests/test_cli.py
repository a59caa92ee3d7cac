# SPDX-License-Identifier: Apache-2.0
"""The `entropykv` command: what it prints, what it exits with, what it hands on."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import types
from importlib import metadata
from pathlib import Path

import pytest

from entropykv_vllm import cli
from entropykv_vllm.model import fetch
from entropykv_vllm.version import __version__


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["--help"])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    for name in (
        "model",
        "doctor",
        "top",
        "plan",
        "simulate",
        "needle",
        "bench-concurrency",
        "version",
    ):
        assert f"\n    {name}" in out
    assert "--kv-eviction" in out


def test_help_is_quick_because_nothing_heavy_is_imported() -> None:
    code = (
        "import sys\n"
        "from entropykv_vllm.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'vllm', 'numpy', 'pydantic', 'yaml', 'tqdm'} & set(sys.modules)\n"
        "raise SystemExit(str(heavy) if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("command", [["version"], ["--version"]])
def test_version(command: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "entropykv_vllm", *command],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split()[-1] == __version__


def test_the_installed_command_is_this_one() -> None:
    (entry,) = metadata.entry_points(group="console_scripts", name="entropykv")
    assert entry.load() is cli.main
    assert metadata.version("entropykv-vllm") == __version__


def test_the_page_of_all_commands_lists_each_once() -> None:
    page = (Path(__file__).parents[1] / "docs/cli.md").read_text()
    listed = re.findall(r"^\| `([a-z-]+)` \|", page, re.MULTILINE)
    assert sorted(listed) == sorted([*cli.ELSEWHERE, "model", "version"])


@pytest.mark.parametrize(
    "words", [[], ["nonsense"], ["model"], ["model", "fetch", "--nonsense"], ["--", "plan"]]
)
def test_a_wrong_command_line_is_refused_with_usage(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(words)
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith("usage: entropykv")


@pytest.mark.parametrize("name", sorted(cli.ELSEWHERE))
def test_hands_the_rest_of_the_line_to_the_command(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[str]] = []
    module = types.ModuleType(cli.ELSEWHERE[name][0])
    module.main = lambda words: seen.append(words)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert cli.main([name, "--help", "--window", "7"]) == 0
    assert seen == [["--help", "--window", "7"]]
    module.main = lambda words: 3  # type: ignore[attr-defined]
    assert cli.main([name]) == 3


@pytest.mark.parametrize("name", sorted(cli.ELSEWHERE))
def test_each_command_elsewhere_exists(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "entropykv_vllm", name, "--help"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: entropykv {name}")


def plan(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    assert cli.main(["plan", "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)


def test_plan_tells_tokens_and_bytes_apart(capsys: pytest.CaptureFixture[str]) -> None:
    report = plan(capsys)
    (tier,) = report["tiers"]
    assert (tier["bits"], tier["cold"], tier["held_tokens"]) == (4, 112, 8192)
    assert report["peak_times_smaller"] == pytest.approx(8192 / 32 / tier["peak_pages"])
    assert cli.main(["plan"]) == 0
    assert "3.16 x smaller, and 3.12 x at the peak" in capsys.readouterr().out


@pytest.mark.parametrize("head_size", ["64", "128"])
@pytest.mark.parametrize(
    ("preset", "tokens", "least"),
    [("quality", 8192, 1.6), ("balanced", 8192, 3), ("long-context", 8192, 5), ("max", 32768, 30)],
)
def test_presets_save_what_they_promise(
    capsys: pytest.CaptureFixture[str], head_size: str, preset: str, tokens: int, least: float
) -> None:
    words = ("--config", preset, "--tokens", str(tokens), "--head-size", head_size)
    assert plan(capsys, *words)["peak_times_smaller"] >= least


def test_plan_compares_pages_of_32_bits_with_a_cache_of_16(
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole = ("--config", '{"bits": 16, "keep": 1.0}', "--dtype", "float32")
    assert plan(capsys, *whole)["peak_times_smaller"] == 0.5


def test_plan_takes_single_settings(capsys: pytest.CaptureFixture[str]) -> None:
    dotted = ("--config.keep", "0.25", "--config.preset=max", "--config.bits=4")
    (tier,) = plan(capsys, *dotted)["tiers"]
    assert (tier["keep"], tier["window"]) == (0.25, 224)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--config.segment", "100"], "segment must be whole pages"),
        (["--config.keep", "2"], "keep is 2: input should be less than or equal to 1"),
        (["--config.keep"], "unrecognized arguments: --config.keep"),
        (["--nonsense", "3"], "unrecognized arguments: --nonsense 3"),
    ],
)
def test_a_wrong_plan_is_refused_in_words(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status(["plan", *words]) == 2
    assert sentence in capsys.readouterr().err


def status(words: list[str]) -> int:
    """The exit status, whoever sees what is wrong."""
    try:
        return cli.main(words)
    except SystemExit as stop:
        return stop.code


#: What only the command itself can see to be wrong.
WRONG = {
    "completion": ["tcsh"],
    "doctor": ["--json", "/nowhere/file"],
    "demo": ["--config", "fast"],
    "top": ["--interval", "0"],
    "plan": ["--config.keep", "2"],
    "simulate": ["--model", "Qwen/Qwen2.5-7B-Instruct", "--trace", "/nowhere"],
    "calibrate": ["/nowhere"],
    "tune": ["/nowhere"],
    "report": ["--chapters", "chess"],
    "needle": ["--model", "/nowhere"],
    "eval": ["--model", "/nowhere"],
    "generation": ["--model", "/nowhere"],
    "quality": ["--model", "/nowhere"],
    "quantization": ["--model", "/nowhere"],
    "bench": ["--presets", "fast"],
    "bench-concurrency": ["--model", "/nowhere"],
    "bench-kernels": ["--only", "chess"],
    "bench-overhead": ["--presets", "fast"],
    "memory": ["--presets", "fast"],
    "attention-cost": ["--query-heads", "9", "--kv-heads", "2"],
    "bench-decode": ["--presets", "fast"],
}


@pytest.mark.parametrize("name", sorted(cli.ELSEWHERE))
def test_every_command_refuses_alike(
    name: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    for words in (WRONG[name], ["--nonsense"]):
        assert status([name, *words]) == 2
        said = capsys.readouterr()
        assert said.out == ""
        assert said.err.splitlines()[-1].startswith(f"entropykv {name}: error: ")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["needle", "--config", "{"], "argument --config: not valid JSON"),
        (["eval", "--config", "3"], "argument --config: a JSON object of settings is wanted"),
        (["eval", "--depths", "0.9,0.1"], "argument --depths: two numbers from 0 to 1"),
        (["generation", "--policies", "best"], "'best' is not a policy: choose of entropykv"),
        (["memory", "--tokens", "many"], "argument --tokens: 'many' is not a whole number"),
    ],
)
def test_a_wrong_value_of_an_option_is_named(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status(words) == 2
    assert sentence in capsys.readouterr().err


def test_fetch_prints_the_folder(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: dict[str, object] = {}

    def fake(cache: Path | None, **options: object) -> Path:
        asked.update(cache=cache, **options)
        return Path("/models/one")

    monkeypatch.setattr(fetch, "fetch_model", fake)
    assert cli.main(["model", "fetch", "--quiet", "--verify", "--dir", "/models"]) == 0
    assert capsys.readouterr().out == "/models/one\n"
    assert asked == {
        "cache": Path("/models"),
        "quiet": True,
        "every_byte": True,
        "name": fetch.NAME,
        "accept_terms": False,
    }


def test_a_failed_fetch_is_one_line_and_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fake(*_args: object, **_options: object) -> Path:
        raise fetch.FetchError("no network")

    monkeypatch.setattr(fetch, "fetch_model", fake)
    assert cli.main(["model", "fetch"]) == 1
    assert capsys.readouterr() == ("", "entropykv model fetch: error: no network\n")


def test_ctrl_c_ends_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fake(*_args: object, **_options: object) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr(fetch, "fetch_model", fake)
    assert cli.main(["model", "fetch"]) == 130
    assert capsys.readouterr() == ("", "entropykv: interrupted\n")


def test_a_reader_that_has_gone_ends_it_without_a_traceback() -> None:
    command = [sys.executable, "-m", "entropykv_vllm", "plan", "--model", "Qwen2.5-7B-Instruct"]
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")
