# SPDX-License-Identifier: Apache-2.0
"""`entropykv simulate`: what it prints and writes, and what it refuses."""

import json
import subprocess
import sys

import pytest

from entropykv_vllm import cli
from entropykv_vllm.config.presets import PRESETS

MODEL = ["--model", "Qwen/Qwen2.5-7B-Instruct", "--weights", "int4", "--gpu", "8GB"]
TRACE = ["--synthetic", "requests=24 prompt=3000 output=60 rate=4 shared=512"]


def simulate(capsys, *words: str) -> dict:
    assert cli.main(["simulate", *MODEL, *TRACE, "--json", "-", *words]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_full_cache_and_each_preset_stand_side_by_side(capsys):
    report = simulate(capsys)
    assert [cache["cache"] for cache in report["caches"]] == ["full, 16 bits", *PRESETS]
    for cache in report["caches"]:
        for part in ("full", "paced"):
            assert cache[part]["answer_tokens"] == report["answer_tokens"]
            assert 0 < cache[part]["held_share"] <= cache[part]["peak_share"] <= 1
            assert cache[part]["prefix_hit_rate"] > 0
        assert cache["limit"] > 0
        assert cache["refused"] == 0


def test_pages_are_those_of_the_planner(capsys):
    report = simulate(capsys, "--preset", "balanced", "max")
    assert cli.main(["plan", *MODEL, "--json"]) == 0
    (card,) = json.loads(capsys.readouterr().out)["cards"]
    planned = {fit["cache"]: fit["pages"] for fit in card["fits"]}
    assert {cache["cache"]: cache["pages"] for cache in report["caches"]} == {
        name: planned[name] for name in ("full, 16 bits", "balanced", "max")
    }
    assert report["room_bytes"] == card["room_bytes"]


def test_the_same_trace_gives_the_same_numbers(capsys):
    words = "--preset", "long-context", "--replicas", "2", "--router", "prefix"
    assert simulate(capsys, *words) == simulate(capsys, *words)


def test_settings_of_your_own_get_a_row(capsys):
    report = simulate(capsys, "--config.keep", "0.3", "--policy", "h2o")
    assert [cache["cache"] for cache in report["caches"]] == ["full, 16 bits", "your settings"]
    full, yours = report["caches"]
    assert full["full"]["prefix_hit_rate"] > yours["full"]["prefix_hit_rate"] == 0


def test_two_replicas_answer_more_than_one(capsys):
    one = simulate(capsys, "--preset", "long-context")
    two = simulate(capsys, "--preset", "long-context", "--replicas", "2")
    for ours, theirs in zip(one["caches"], two["caches"], strict=True):
        assert theirs["paced"]["wait"]["mean"] < ours["paced"]["wait"]["mean"]


def test_steps_need_no_times(capsys):
    report = simulate(capsys, "--steps", "--preset", "max")
    assert report["times"] is None
    for cache in report["caches"]:
        assert "paced" not in cache
        assert cache["full"]["seconds"] == cache["full"]["steps"]


def test_requests_longer_than_fit_are_refused_and_said_to_be(capsys):
    words = ["simulate", *MODEL, "--preset", "max"]
    words += ["--synthetic", "requests=8 prompt=15000 output=50 spread=0.3"]
    assert cli.main(words) == 0
    out = capsys.readouterr().out
    assert "full, 16 bits refuses" in out
    assert "max refuses" not in out
    assert "Times are a model's, not measured" in out


def test_numbers_are_written_to_a_file_beside_the_table(capsys, tmp_path):
    path = tmp_path / "out.json"
    words = ["simulate", *MODEL, *TRACE, "--preset", "max", "--json", str(path)]
    assert cli.main(words) == 0
    table = capsys.readouterr().out
    assert "As they come:" in table
    rate = json.loads(path.read_text())["caches"][1]["limit"]
    assert f"{rate:,.0f}" in table


def test_a_file_that_cannot_be_written_is_named_and_the_table_is_not_lost(capsys):
    words = ["simulate", *MODEL, *TRACE, "--preset", "max", "--json", "/dev/full"]
    assert cli.main(words) == 1
    streams = capsys.readouterr()
    assert "As they come:" in streams.out
    assert "/dev/full cannot be written: No space left" in streams.err


def test_given_times_take_the_place_of_the_cards(capsys):
    words = "--preset", "max", "--prefill-rate", "5000", "--step-ms", "20", "--bandwidth", "500GB"
    assert simulate(capsys, *words)["times"] == {
        "fixed": 0.02,
        "rate": 5000,
        "bandwidth": 500 * 10**9,
        "card": None,
    }


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([*MODEL], "name one trace"),
        ([*MODEL, *TRACE, "--trace", "x"], "name one trace"),
        ([*TRACE], "name a model"),
        ([*MODEL, "--trace", "/nowhere.csv"], "/nowhere.csv cannot be read"),
        ([*MODEL, *TRACE, "--replicas", "0"], "--replicas is 0: it must be more than 0"),
        ([*MODEL, *TRACE, "--speed", "nan"], "--speed is nan: it must be a number from"),
        ([*MODEL, *TRACE, "--step-ms", "nan"], "--step-ms is nan: it must be a number from"),
        ([*MODEL, *TRACE, "--prefill-rate", "inf"], "--prefill-rate is inf: it must be a number"),
        (
            [*MODEL, *TRACE, "--requests", "9" * 20],
            f"--requests is {'9' * 20}: it must be a number",
        ),
        ([*MODEL, "--synthetic", "rate=1e-300"], "the last request comes after more than"),
        ([*MODEL[:2], *TRACE, "--gpu", "8,24"], "--gpu is 8,24: give the one card"),
        ([*MODEL[:2], *TRACE, "--gpu", "8GB"], "the weights take"),
        ([*MODEL, *TRACE, "--preset", "fast"], "invalid choice: 'fast'"),
        ([*MODEL, *TRACE, "--config.keep", "2"], "keep is 2"),
        ([*MODEL, *TRACE, "--max-model-len", "long"], "'long' is not a number of tokens"),
        ([*MODEL, *TRACE, "--max-model-len", "100"], "every request is longer"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(capsys, words, sentence):
    try:
        status = cli.main(["simulate", *words])
    except SystemExit as stop:
        status = stop.code
    assert status == 2
    assert sentence in capsys.readouterr().err


def test_neither_torch_nor_vllm_is_imported():
    code = (
        "import sys\n"
        "from entropykv_vllm.cli import main\n"
        f"main({['simulate', *MODEL, *TRACE, '--preset', 'max']})\n"
        "heavy = {'torch', 'vllm', 'numpy', 'transformers'} & set(sys.modules)\n"
        "raise SystemExit(str(heavy) if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
