# SPDX-License-Identifier: Apache-2.0
"""`entropykv completion`: what the scripts offer, asked of bash itself."""

from __future__ import annotations

import importlib
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from entropykv_vllm import cli
from entropykv_vllm.completion import command, tree
from entropykv_vllm.config.presets import PRESETS


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


def test_fish_offers_commands_and_options_with_their_help(commands: list[tree.Command]) -> None:
    lines = command.SHELLS["fish"](commands).splitlines()
    plan = "complete -c entropykv -n '__fish_seen_subcommand_from plan'"
    presets = f"{plan} -l preset -x -a '{' '.join(PRESETS)}' -d "
    assert any(line.startswith(presets) for line in lines)
    assert any(line.startswith(f"{plan} -l page -x -d ") for line in lines)
    assert any(line.startswith(f"{plan} -l tied -d ") for line in lines)
    version = "complete -c entropykv -n '__fish_use_subcommand' -f -a version -d "
    assert f"{version}'print the version'" in lines
    own = sum(line.startswith(f"{plan} -") for line in lines)
    assert own == sum(len(c.options) for c in commands if c.path == ("plan",))


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_can_read_theirs(shell: str, commands: list[tree.Command]) -> None:
    if (found := shutil.which(shell)) is None:
        pytest.skip(f"no {shell} here")
    script = command.SHELLS[shell](commands)
    subprocess.run([found, "-n"], input=script, text=True, check=True)


def test_help_with_quotes_is_still_one_word_of_fish() -> None:
    from entropykv_vllm.completion.fish import _quoted

    assert _quoted("a model's \\ folder") == "'a model\\'s \\\\ folder'"
