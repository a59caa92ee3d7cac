# SPDX-License-Identifier: Apache-2.0
"""All commands through the same wrong inputs: one sentence, the right status, no traceback."""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from entropykv_vllm import cli
from entropykv_vllm.model import fetch

MODEL = "Qwen/Qwen2.5-7B-Instruct"
#: What a command needs beside the option that is wrong.
BESIDE = {
    "plan": ["--model", MODEL],
    "simulate": ["--model", MODEL, "--synthetic", "requests=2 prompt=100 output=4"],
}
#: Options that take any text, or the path of what is yet to be made.
ANY_TEXT = {
    "--out",
    "--data",
    "--json",
    "--serve",
    "--tokenizer",
    "--kv-cache-dtype",
    "--model",
    "--url",
}
CONFIG = {
    "max_position_embeddings": 8192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_size": 256,
}
WRONG = ("nan", "-1", "9" * 40, "many")


def options(name: str) -> Iterator[argparse.Action]:
    """The options of a command that take a value."""
    for action in importlib.import_module(cli.ELSEWHERE[name][0]).parser()._actions:
        if action.option_strings and action.nargs != 0:
            yield action


def having(option: str) -> list[str]:
    return [
        name
        for name in sorted(cli.ELSEWHERE)
        if any(option in action.option_strings for action in options(name))
    ]


@pytest.fixture(autouse=True)
def model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A model of which there is no more than its configuration; nothing can be measured on it."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    monkeypatch.setattr(fetch, "fetch_model", lambda *_, **__: folder)
    monkeypatch.chdir(tmp_path)
    return folder


def refusal(
    capsys: pytest.CaptureFixture[str], name: str, *words: str, status: int | None = 2
) -> str:
    """What a command says when it refuses; that it does is checked."""
    try:
        found = cli.main([name, *words])
    except SystemExit as stop:
        found = stop.code
    said = capsys.readouterr()
    assert (said.out, found) == ("", status)
    last = said.err.splitlines()[-1]
    assert last.startswith(f"entropykv {name}: error: ")
    return last


@pytest.mark.parametrize("name", sorted(cli.ELSEWHERE))
def test_a_wrong_value_of_any_option_is_refused_by_its_name(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for action in options(name):
        option = action.option_strings[0]
        for value in WRONG if not ANY_TEXT & set(action.option_strings) else ():
            said = refusal(capsys, name, *BESIDE.get(name, []), f"{option}={value}")
            assert option in said or value in said, (option, value, said)


@pytest.mark.parametrize("name", having("--out"))
def test_results_that_cannot_be_written_are_refused(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    for out in ("file", "file/below"):
        assert "argument --out" in refusal(capsys, name, "--out", out)


@pytest.mark.parametrize("name", having("--json"))
def test_json_that_cannot_be_written_is_refused(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for place in (tmp_path, tmp_path / "none" / "file"):
        assert "argument --json: " in refusal(capsys, name, "--json", str(place))


@pytest.mark.parametrize("name", having("--text"))
def test_a_text_that_cannot_be_read_is_refused(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00" * 9)
    for path in ("none", ".", "binary"):
        said = refusal(capsys, name, "--text", path)
        assert "--text" in said
        assert f"{path}" in said


@pytest.mark.parametrize("name", having("--model"))
def test_what_is_no_model_is_refused(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "config.json").write_text('{"max_position')
    (tmp_path / "list").mkdir()
    (tmp_path / "list" / "config.json").write_text("[]")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text('{"n_layer": 2}')
    for folder in ("none", "empty", "torn", "list", "other"):
        words = ["--synthetic", "requests=2"] if name == "simulate" else []
        said = refusal(capsys, name, *words, "--model", folder)
        # These two are told what they miss, and take it as an option.
        assert ("--layers" if folder == "other" and name in BESIDE else folder) in said
        if name in ("calibrate", "tune"):
            assert folder in refusal(capsys, name, folder)


def test_every_option_says_what_it_is() -> None:
    for name in cli.ELSEWHERE:
        parser = importlib.import_module(cli.ELSEWHERE[name][0]).parser()
        assert parser.description
        assert not parser.description.startswith("`")
        assert not parser.allow_abbrev
        assert [a.option_strings for a in parser._actions if not a.help] == []


def test_what_the_system_refuses_is_a_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(words: list[str]) -> int:
        raise OSError(28, "No space left on device", "results/table.md")

    monkeypatch.setattr(importlib.import_module(cli.ELSEWHERE["doctor"][0]), "main", full)
    said = refusal(capsys, "doctor", status=1)
    assert "No space left on device: 'results/table.md'" in said


@pytest.mark.parametrize("name", ["torch", "entropykv_vllm.nothing"])
def test_a_package_that_is_missing_is_named_and_a_module_of_ours_is_an_error(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(words: list[str]) -> int:
        raise ModuleNotFoundError(f"No module named '{name}'", name=name)

    monkeypatch.setattr(importlib.import_module(cli.ELSEWHERE["doctor"][0]), "main", missing)
    if name == "torch":
        assert "this needs the Python package 'torch'" in refusal(capsys, "doctor", status=1)
    else:
        with pytest.raises(ModuleNotFoundError):
            cli.main(["doctor"])
