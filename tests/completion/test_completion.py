# SPDX-License-Identifier: Apache-2.0
"""`entropykv completion`: what the scripts offer, asked of the shells themselves."""

from __future__ import annotations

import importlib
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from entropykv_vllm import cli
from entropykv_vllm.completion import command, tree
from entropykv_vllm.completion import fish as fish_script
from entropykv_vllm.completion import zsh as zsh_script
from entropykv_vllm.config.presets import PRESETS
from entropykv_vllm.model.sources import SOURCES
from tests.completion import shells


@pytest.fixture(scope="module")
def commands() -> list[tree.Command]:
    return tree.commands(cli.parser(), cli.ELSEWHERE)


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "entropykv.bash"
    done = subprocess.run(
        [sys.executable, "-m", "entropykv_vllm", "completion", "bash"],
        capture_output=True,
        text=True,
        check=True,
    )
    path.write_text(done.stdout)
    return path


def offered(script: Path, *words: str) -> set[str]:
    """What bash offers for the last of some words."""
    line = " ".join(map(shlex.quote, words))
    ask = (
        f"source {script}; COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; "
        "_entropykv; printf '%s\\n' \"${COMPREPLY[@]}\""
    )
    done = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return set(done.stdout.split())


def test_bash_offers_all_commands(script: Path) -> None:
    assert {"model", "version", *cli.ELSEWHERE} <= offered(script, "entropykv", "")
    assert offered(script, "entropykv", "do") == {"doctor"}


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (("model", "f"), {"fetch"}),
        (("model", "fetch", "--q"), {"--quiet"}),
        (("plan", "--model", "x", "--pre"), {"--preset"}),
        (("plan", "--preset", ""), set(PRESETS)),
        (("plan", "--preset", "=", "st"), {"streaming"}),
        (("plan", "--preset", "="), set(PRESETS)),
        (("plan", "--preset", "max", "--tied"), {"--tied"}),
        (("top", "--o"), {"--once"}),
        (("top", "--interval", "--o"), set()),
        (("plan", "--config", ""), set()),
        (("completion", ""), {"bash", "zsh", "fish", "-h", "--help"}),
        (("nonsense", "do"), {"doctor"}),
    ],
)
def test_bash_offers_what_may_come_next(
    script: Path, words: tuple[str, ...], wanted: set[str]
) -> None:
    assert offered(script, "entropykv", *words) == wanted


@pytest.mark.parametrize("name", sorted(cli.ELSEWHERE))
def test_bash_offers_every_option_of_a_command(script: Path, name: str) -> None:
    parser = importlib.import_module(cli.ELSEWHERE[name][0]).parser()
    assert parser.prog == f"entropykv {name}"
    options = {word for action in parser._actions for word in action.option_strings}
    assert offered(script, "entropykv", name, "-") == options


def test_a_command_whose_needs_are_missing_is_offered_by_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, cli.ELSEWHERE["tune"][0], None)
    found = {c.path: c for c in tree.commands(cli.parser(), cli.ELSEWHERE)}
    assert found[("tune",)].options == []
    assert found[("calibrate",)].options != []


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a shell stands: a folder with one file."""
    path = tmp_path_factory.mktemp("here")
    (path / "notes.txt").touch()
    return path


def written(shell: str, commands: list[tree.Command], folder: Path) -> Path:
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    path = folder.parent / f"entropykv.{shell}"
    path.write_text(command.SHELLS[shell](commands))
    return path


@pytest.fixture(scope="module")
def zsh(commands: list[tree.Command], folder: Path) -> Iterator[Callable[[str], set[str]]]:
    shell = shells.Zsh(written("zsh", commands, folder), folder)
    yield shell.offered
    shell.close()


@pytest.fixture(scope="module")
def fish(commands: list[tree.Command], folder: Path) -> Callable[[str], set[str]]:
    path = written("fish", commands, folder)
    return lambda line: shells.fish(path, line, folder)


#: A line, and what both shells offer for its last word.
LINES = {
    "do": {"doctor"},
    "model ": {"fetch"},
    "model fetch --q": {"--quiet"},
    "model fetch --name ": set(SOURCES),
    "plan --model x --pre": {"--preset"},
    "plan --preset ": set(PRESETS),
    "completion ": {"bash", "zsh", "fish"},
    # A command's name may be the value of an option.
    "top --json completion --o": {"--once"},
    "top --interval ": set(),
    "tune --text ": {"notes.txt"},
    "tune --text n": {"notes.txt"},
    "eval --config n": {"notes.txt"},
    "plan --json n": {"notes.txt"},
    "tune n": {"notes.txt"},
}


@pytest.mark.parametrize("shell", ["zsh", "fish"])
@pytest.mark.parametrize("line", LINES)
def test_zsh_and_fish_offer_what_may_come_next(
    shell: str, line: str, request: pytest.FixtureRequest
) -> None:
    offered = request.getfixturevalue(shell)
    assert offered(f"entropykv {line}") == LINES[line]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_zsh_and_fish_offer_all_commands_and_options(
    shell: str, commands: list[tree.Command], request: pytest.FixtureRequest
) -> None:
    offered = request.getfixturevalue(shell)
    assert offered("entropykv ") == {"model", "version", *cli.ELSEWHERE}
    for found in commands:
        if len(found.path) == 1 and not found.inner:
            long = {name for o in found.options for name in o.names if name.startswith("--")}
            assert offered(f"entropykv {found.path[0]} --") == long


@pytest.mark.parametrize(("shell", "start"), [("zsh", ""), ("fish", "--preset=")])
def test_a_value_may_be_joined_to_its_option(
    shell: str, start: str, request: pytest.FixtureRequest
) -> None:
    found = request.getfixturevalue(shell)("entropykv plan --preset=st")
    assert found == {f"{start}streaming"}


def test_the_shells_show_what_words_are_about(commands: list[tree.Command], folder: Path) -> None:
    said = command.SHELLS["fish"](commands)
    assert "-f -a version -d 'print the version'" in said
    assert "'version:print the version'" in command.SHELLS["zsh"](commands)


def test_help_with_quotes_and_signs_is_still_one_word() -> None:
    option = tree.Option(("--a",), "a model's [folder]: \\ or /", "file")
    assert zsh_script._spec(option, "--a") == (
        "'(--a)--a=[a model'\\''s \\[folder\\]\\: \\\\ or /]: :_files'"
    )
    assert fish_script._quoted("a model's \\ folder") == "'a model\\'s \\\\ folder'"
