# SPDX-License-Identifier: Apache-2.0
"""Tables and examples of the pages are what commands print, stored data say and settings are."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex

import pytest
import yaml

from entropykv_vllm import cli
from entropykv_vllm.config.policies import MODULES
from entropykv_vllm.config.presets import PRESETS
from entropykv_vllm.config.settings import EvictionConfig, load, preset_names
from tests.docs.markdown import ROOT, block

PRESET_PAGES = ("docs/settings.md", "README.md")
COMMANDS = [
    (page.name, words, printed)
    for page in (ROOT / "docs/lara.md", ROOT / "docs/paging.md", ROOT / "docs/settings.md")
    for words, printed in re.findall(
        r"^```\n\$ entropykv (.*?)\n(.*?)```", page.read_text(), re.MULTILINE | re.DOTALL
    )
]


def smaller(context: int) -> dict[str, float]:
    """How much less memory each preset takes at the peak, by `entropykv plan`."""
    words = ["plan", "--json", "--model", "Qwen2.5-7B-Instruct", "--context", str(context)]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert cli.main(words) == 0
    caches = json.loads(out.getvalue())["caches"]
    return {cache["cache"]: cache["times_smaller"] for cache in caches}


@pytest.mark.parametrize("page", PRESET_PAGES)
def test_the_presets_hold_what_the_pages_say(page):
    rows = {row[0].strip("`"): row for row in block(page, "presets")}
    assert sorted(rows) == preset_names()
    for context, column in (8192, 3), (32768, 4):
        found = smaller(context)
        for name, row in rows.items():
            assert row[column].split()[0] == f"{found[name]:.1f}", (name, context)


@pytest.mark.parametrize("page", PRESET_PAGES)
def test_the_presets_are_what_the_pages_say(page):
    for row in block(page, "presets"):
        config = yaml.safe_load((ROOT / f"configs/{row[0].strip('`')}.yaml").read_text())
        if "keep" in config:
            kept = "all" if config["keep"] == 1 else f"{100 * config['keep']:.0f} %"
            assert row[1:3] == [kept, str(config["bits"])]


def test_the_lengths_of_the_presets_are_what_the_page_says():
    for row in block("docs/settings.md", "presets"):
        config = load(PRESETS[row[0]], row[0])
        assert row[5:] == [f"{config.window:,}", f"{config.interval:,}"]


def test_the_page_names_every_setting_with_its_default():
    rows = {row[0].strip("`"): row[1].strip("`") for row in block("docs/settings.md", "settings")}
    assert sorted(rows) == sorted(["preset", *EvictionConfig.model_fields])
    for name, field in EvictionConfig.model_fields.items():
        default = field.default
        if default is not None:
            number = isinstance(default, float | int) and not isinstance(default, bool)
            assert rows[name] == (f"{default:g}" if number else str(default).lower())


def test_the_page_names_every_policy():
    column = " ".join(row[0] for row in block("docs/settings.md", "policies"))
    assert sorted(re.findall(r"`(\w+)`", column)) == sorted(MODULES)


def test_the_cost_of_attention_is_what_was_measured():
    stored = json.loads((ROOT / "docs/data/attention-cost/table.json").read_text())
    rows = {row["tokens"]: row for row in stored["rows"]}
    page = (ROOT / "docs/attention.md").read_text()
    for tokens, cache, matrix, peak, table, free in block("docs/attention.md", "attention-cost"):
        row = rows[int(tokens)]
        measured = row["measured"]
        most = measured["matrix"]["bytes"] / 1e6 if "matrix" in measured else None
        found = [
            f"{row['cache'] / 1e6:.1f}",
            f"{row['matrix'] / 1e6:,.0f}",
            "–" if most is None else f"{most:,.0f}",
            f"{row['table'] / 1e6:.2f}",
            f"{measured['free']['bytes'] / 1e6:.2f}",
        ]
        assert [cache, matrix, peak, table, free] == found
    assert f"takes {rows[8192]['matrix'] / rows[8192]['cache']:.0f} times as much" in page
    for memory, tokens in stored["passes"].items():
        assert f"{memory} at {tokens:,}" in page


def test_the_example_prints_what_the_page_says(capsys):
    page = (ROOT / "docs/scores.md").read_text()
    code, printed = re.search(r"```python\n(.*?)```\n\n```\n(.*?)```", page, re.DOTALL).groups()
    exec(code, {})
    assert capsys.readouterr().out == printed


@pytest.mark.parametrize(("page", "words", "printed"), COMMANDS)
def test_the_commands_print_what_the_pages_say(page, words, printed, capsys):
    assert cli.main(shlex.split(words)) == 0
    assert capsys.readouterr().out == printed


def test_there_are_commands_to_compare():
    assert "lara.md" in {page for page, _, _ in COMMANDS}
