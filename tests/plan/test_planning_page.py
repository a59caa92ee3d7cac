# SPDX-License-Identifier: Apache-2.0
"""Every figure of docs/planning.md is what its command prints."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from entropykv_vllm import cli
from entropykv_vllm.plan.model_config import known_models

PAGE = (Path(__file__).parents[2] / "docs/planning.md").read_text()
EXAMPLES = re.findall(r"^```\n\$ entropykv (.*?)\n(.*?)```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(("words", "printed"), EXAMPLES, ids=[words for words, _ in EXAMPLES])
def test_the_page_shows_what_the_command_prints(words, printed, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    cli.main(shlex.split(words))
    streams = capsys.readouterr()
    assert streams.out + streams.err == printed


def test_the_page_has_examples_and_names_every_shipped_model():
    assert len(EXAMPLES) >= 5
    for name in known_models():
        assert name.partition("/")[2] in PAGE
