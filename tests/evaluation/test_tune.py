# SPDX-License-Identifier: Apache-2.0
"""Which settings are given up, which of them wins, and what is left to serve with."""

import json
import shlex
from types import SimpleNamespace

import pytest
import yaml

from entropykv_vllm import cli
from entropykv_vllm.config.settings import load
from entropykv_vllm.errors import RunError
from entropykv_vllm.evaluation import table
from entropykv_vllm.evaluation.calibration import search
from entropykv_vllm.evaluation.calibration.run import Summary
from entropykv_vllm.evaluation.offline.cell import Cell
from entropykv_vllm.evaluation.tune import choice, command, files, plot, race
from entropykv_vllm.evaluation.tune.race import Standing


class Config:
    model_type, hidden_size, num_hidden_layers = "llama", 8, 4

    def get_text_config(self):
        return self


NET = SimpleNamespace(net=SimpleNamespace(config=Config()), full=[0, 1, 2, 3], tokenizer=None)


def cell(name):
    return Cell(name, "none" if name == "full cache" else "entropykv", {"keep": 0.25, "bits": 4})


def summary(name, right, held=0.2):
    return Summary(cell(name), held, 0.5, right, 0.01)


def standing(name, right, texts, held=0.2):
    return Standing(cell(name), held, texts, 0.5 * texts, right, 0.01 * texts)


def test_the_least_memory_that_reaches_the_target_wins():
    found = [
        summary("full cache", 0.96, held=1.0),
        summary("too few", 0.8, held=0.05),
        summary("enough", 0.95, held=0.1),
        summary("more", 0.96, held=0.2),
    ]
    assert choice.best(found, 0.98).cell.name == "enough"
    assert choice.best(found, 1.0).cell.name == "more"
    assert choice.best(found[:2], 0.98) is None


def test_too_few_texts_are_said_to_be_too_few():
    assert command.warning(24, 0.98) is None
    assert command.warning(2, 0.4) is None
    assert "100 (21-100) %" in command.warning(1, 0.98)
    assert "--texts 12 says little about 98 %" in command.warning(12, 0.98)


def test_rounds_double_until_all_texts_are_answered():
    assert race.rounds(24) == [3, 6, 12, 24]
    assert race.rounds(2) == [2]


def test_a_window_is_tried_once_and_holds_the_question(capsys):
    parser = command.parser()
    assert parser.parse_args(["--windows", "64,64,128"]).windows == [64, 128]
    with pytest.raises(SystemExit):
        parser.parse_args(["--windows", "16"])
    assert "16 is not from 32" in capsys.readouterr().err


def test_nothing_is_tuned_on_a_full_cache_that_answers_little():
    race.check_full(12, 24, 24)
    race.check_full(0, 3, 24)  # may still answer most
    with pytest.raises(RunError, match="the full cache answers 0 of 6 texts right"):
        race.check_full(0, 6, 24)
    with pytest.raises(RunError, match="11 of 24"):
        race.check_full(11, 24, 24)


def test_cells_that_answer_nothing_are_given_up_even_if_the_full_cache_answers_little():
    found = [standing("full cache", 1, 12), standing("none", 0, 12), standing("half", 6, 12)]
    assert [one.cell.name for one in race.hopeful(found, 0.98)] == ["full cache", "half"]


def test_what_was_given_up_stays_given_up():
    found = [standing("full cache", 12, 12), standing("early", 6, 6), standing("late", 12, 12)]
    assert [one.cell.name for one in race.hopeful(found, 0.98)] == ["full cache", "late"]


def raced(monkeypatch, tmp_path, rights):
    """The standings after a race whose cells answer the share `rights` of each round right."""
    cells = [Cell("full cache", "none"), *(cell(name) for name in rights)]
    asked = []

    def run(net, model, book, texts, cells, file, progress):
        asked.append((texts.count, texts.seed, [one.name for one in cells]))
        progress(texts.count, texts.count)
        return [Summary(one, 0.3, 0.5, rights.get(one.name, 1.0), 0.01) for one in cells]

    monkeypatch.setattr(race, "run", run)
    monkeypatch.setattr(race, "order_of", lambda *_: [3, 1, 0, 2])
    monkeypatch.setattr(search, "cells", lambda order, windows: cells)
    monkeypatch.setattr(race.check, "sentences", lambda args, tokenizer: [])
    monkeypatch.setattr(race.engines, "model_folder", lambda model: model)
    monkeypatch.setattr(race.engines, "load_tokenizer", lambda model: None)
    monkeypatch.setattr("entropykv_vllm.evaluation.offline.model.Model", lambda folder: NET)
    args = SimpleNamespace(
        model="m", texts=8, tokens=2048, seed=0, out=tmp_path, profile=None, windows=[256]
    )
    args.target_accuracy = 0.98
    return race.race(args)[1], asked


def test_a_race_goes_on_with_what_may_still_win(monkeypatch, tmp_path):
    found, asked = raced(monkeypatch, tmp_path, {"good": 1.0, "bad": 0.0})
    assert asked == [
        (4, 100, ["full cache", "good", "bad"]),
        (4, 104, ["full cache", "good"]),
    ]
    assert [(one.cell.name, one.texts, one.right) for one in found] == [
        ("full cache", 8, 8.0),
        ("good", 8, 8.0),
        ("bad", 4, 0.0),
    ]


def args_of(tmp_path, words=()):
    args = command.parser().parse_args(["--texts", "12", *words])
    args.out = tmp_path
    return args


def test_what_is_found_is_shown_and_written(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(files.engines, "model_folder", lambda model: "/models/mine")
    found = [
        standing("full cache", 12, 12, held=1.0),
        standing("half", 12, 12, held=0.5),
        standing("early", 1, 6, held=0.1),
    ]
    assert command.conclude(args_of(tmp_path), NET, found) == 0
    said = capsys.readouterr().out
    assert [row["settings"] for row in table.records(said)] == ["half", "full cache"]
    assert "1 of 2 settings may still reach the target" in said
    assert "best: half, 2.0 times less" in said
    assert command.conclude(args_of(tmp_path, ["--json"]), NET, found) == 0
    numbers = json.loads(capsys.readouterr().out)
    assert numbers == json.loads((tmp_path / "table.json").read_text())
    assert [one["name"] for one in numbers["settings"]] == ["half", "full cache"]
    assert numbers["settings"][0]["settings"] == {"policy": "entropykv", "keep": 0.25, "bits": 4}
    assert [(one["name"], one["texts"]) for one in numbers["given up"]] == [("early", 6)]
    assert numbers["best"] == "half"


def test_the_written_files_are_what_vllm_serve_takes(monkeypatch, tmp_path):
    monkeypatch.setattr(files.engines, "model_folder", lambda model: "/models/mine")
    winner = summary("half", 1.0)
    made = files.write(tmp_path, Config(), "/models/mine", winner)
    said = files.advice(winner, made)
    assert f"vllm serve --config {made.server}" in said
    assert shlex.split(said.split("\n\n")[1])[-1] == str(made.settings)
    config = load("entropykv", str(made.settings))
    assert (config.keep, config.bits) == (0.25, 4)
    server = yaml.safe_load(made.server.read_text())
    assert server["model"] == "/models/mine"
    assert server["kv-eviction-config"] == str(made.settings)


def test_nothing_that_reaches_the_target_is_status_1(tmp_path, capsys):
    found = [standing("full cache", 12, 12, held=1.0), standing("half", 11, 12, held=0.5)]
    assert command.conclude(args_of(tmp_path), NET, found) == 1
    assert "nothing reaches the target" in capsys.readouterr().out
    assert not (tmp_path / "serve.yaml").exists()


def test_the_picture_shows_all(tmp_path):
    pytest.importorskip("matplotlib")
    found = [standing("full cache", 12, 12, held=1.0), standing("early", 1, 6, held=0.1)]
    assert plot.draw(found, summary("half", 0.9), 0.98, tmp_path / "right.png")
    assert (tmp_path / "right.png").stat().st_size > 1000


def test_a_warning_comes_before_anything_is_measured(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(command.check, "check", lambda args, name: None)

    def stop(args):
        raise ValueError("the text has 3 tokens, and 2048 are needed")

    monkeypatch.setattr(command, "race", stop)
    assert cli.main(["tune", "--texts", "1"]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("entropykv tune: warning: --texts 1 says little")
    assert second == "entropykv tune: error: the text has 3 tokens, and 2048 are needed"
