# SPDX-License-Identifier: Apache-2.0
"""Every table of docs/simulation.md is what its command prints."""

import re
import shlex
from pathlib import Path

import pytest

from entropykv_vllm import cli
from entropykv_vllm.simulation.azure import HEADER
from entropykv_vllm.simulation.flags import parser
from entropykv_vllm.simulation.read import read_trace
from entropykv_vllm.simulation.router import ROUTERS
from entropykv_vllm.simulation.synthetic import Synthetic

PAGE = (Path(__file__).parents[2] / "docs/simulation.md").read_text()
EXAMPLES = re.findall(r"^```\n\$ entropykv (.*?)\n(.*?)```", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = re.findall(r"^entropykv simulate (.*)$", PAGE, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize(("words", "printed"), EXAMPLES, ids=[words for words, _ in EXAMPLES])
def test_the_page_shows_what_the_command_prints(words, printed, capsys):
    assert cli.main(shlex.split(words)) == 0
    assert capsys.readouterr().out == printed


def test_the_page_has_examples_and_commands_that_are_understood():
    assert len(EXAMPLES) == 3
    assert len(COMMANDS) >= 4
    for words in COMMANDS:
        _, rest = parser().parse_known_args(shlex.split(words))
        assert not [word for word in rest if word.startswith("--") and "config." not in word]


def test_the_page_names_each_router_and_number_of_a_trace():
    assert all(f"`{name}`" in PAGE for name in ROUTERS)
    assert all(f"{name}={value:g}" in PAGE for name, value in vars(Synthetic()).items())
    assert f"`{HEADER}`" in PAGE


def test_the_line_of_a_trace_on_the_page_is_one(tmp_path):
    (line,) = re.findall(r"`(\{\"timestamp.*?\})`", PAGE)
    path = tmp_path / "trace.jsonl"
    path.write_text(line)
    assert read_trace(path)[0].prompt == 1100
