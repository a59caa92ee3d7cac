# SPDX-License-Identifier: Apache-2.0
"""`--json`, which each command with a table has: the same for programs, and nothing beside it."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from entropykv_vllm import cli, json_file
from entropykv_vllm.errors import RunError
from entropykv_vllm.evaluation import (
    calibrate,
    concurrency,
    decode_bench,
    generation,
    memory,
    quality,
    quantization,
    table,
)
from entropykv_vllm.evaluation.attention_cost import command as attention_cost
from entropykv_vllm.evaluation.bench import command as bench
from entropykv_vllm.evaluation.bench_kernels import command as bench_kernels
from entropykv_vllm.evaluation.needle import command as needle
from entropykv_vllm.evaluation.report import chapters
from entropykv_vllm.evaluation.report import command as report
from tests.evaluation.test_bench import result

SHARE = [0.5, 0.25, 0.75]
TABLES = sorted(set(cli.ELSEWHERE) - {"completion"})


@pytest.mark.parametrize("name", TABLES)
def test_all_commands_with_a_table_spell_it_alike(name: str) -> None:
    parser = importlib.import_module(cli.ELSEWHERE[name][0]).parser()
    (action,) = (a for a in parser._actions if "--json" in a.option_strings)
    assert (action.metavar, action.nargs, action.const) == ("FILE", "?", "-")


def test_a_place_where_nothing_can_be_written_is_refused_before_anything_is_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for place in (tmp_path, tmp_path / "none" / "file"):
        with pytest.raises(SystemExit):
            cli.main(["plan", "--json", str(place)])
        assert "is no file in a folder that there is" in capsys.readouterr().err
    with pytest.raises(RunError, match="cannot be written"):
        json_file.write({}, tmp_path)


def test_into_a_file_go_the_numbers_and_the_table_is_printed_as_ever(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan"]) == 0
    text = capsys.readouterr().out
    assert cli.main(["plan", "--json", str(tmp_path / "plan.json")]) == 0
    assert capsys.readouterr().out == text
    assert cli.main(["plan", "--json", "-"]) == 0
    printed = capsys.readouterr().out
    assert printed == (tmp_path / "plan.json").read_text()
    assert json.loads(printed)["tokens"] == 8192


def concurrency_results() -> list[dict]:
    spec = {"engine": {"kv_cache_memory_bytes": 1 << 20}}
    return [
        {"spec": {**spec, "policy": policy}, **dict.fromkeys(concurrency.ROWS, 1)}
        for policy in ("none", "entropykv")
    ]


def decode_results() -> list[dict]:
    speed = {"tokens/s": 9, "step seconds": 1, "reading seconds": 1, "moving share": 0.1}
    return [{"spec": {"name": decode_bench.STOCK, "batch": 1}, **speed}]


def memory_results() -> tuple[list[dict], int]:
    part = {"pages": 9, "bytes": 8, "ratio": 0.5, "bytes a token": 512}
    found = {
        "spec": {"name": "a row", "eviction": {"preset": "max"}, "tokens": 8},
        **dict.fromkeys(("prompt", "decode", "peak"), part),
        "planned peak pages": 10,
    }
    return [found], 0


def quality_results() -> tuple[list[dict], int]:
    engine = {"kv_cache_dtype": "auto"}
    spec = {"policy": "none", "name": quality.FULL, "eviction": {}, "engine": engine}
    return [{"spec": spec, "kl": SHARE, "top1": SHARE, "texts": []}], 0


def quantization_results() -> list[dict]:
    sides = {"keys": "k", "values": "v", "bits": 4, "bytes": 0.3}
    return [{**sides, "kl": SHARE, "top1": SHARE, "texts": []}]


def needle_results() -> tuple[list[dict], int]:
    spec = {"policy": "none", "keep": 1.0, "tokens": 2048, "eviction": {}}
    numbers = {"held": 1.0, "peak": 1.0, "exact": SHARE, "digits": SHARE, "form": SHARE}
    return [{"spec": spec, **numbers, "answers": [{"number": "1", "answer": " 1"}] * 2}], 0


#: The module of a command, what its `measure` finds, and what of it is in the JSON.
MEASURED: dict[str, tuple[ModuleType, Callable[[], Any], Callable[[Any], bool]]] = {
    "bench-concurrency": (concurrency, concurrency_results, lambda said: len(said) == 2),
    "bench-decode": (decode_bench, decode_results, lambda said: said[0]["tokens/s"] == 9),
    "memory": (memory, memory_results, lambda said: said[0]["planned peak pages"] == 10),
    "quality": (quality, quality_results, lambda said: said[0]["kl"] == SHARE),
    "quantization": (
        quantization,
        quantization_results,
        lambda said: said["variants"][0]["bits"] == 4 and "json" not in said["settings"],
    ),
    "needle": (
        needle,
        needle_results,
        lambda said: said[0]["exact"] == SHARE and "answers" not in said[0],
    ),
}


@pytest.mark.parametrize("name", sorted(MEASURED))
def test_measured(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module, results, right = MEASURED[name]
    monkeypatch.setattr(module, "measure", lambda *_: results())
    for check in ("check", "crowded"):
        if hasattr(module, check):
            monkeypatch.setattr(module, check, lambda args: [True, False])
    if hasattr(module, "engines"):
        monkeypatch.setattr(module.engines, "check_length", lambda *_: None)
    assert cli.main([name, "--out", str(tmp_path), "--json"]) == 0
    said = capsys.readouterr().out
    assert right(json.loads(said))
    assert cli.main([name, "--out", str(tmp_path)]) == 0
    assert (tmp_path / "table.md").read_text().strip() in capsys.readouterr().out


@pytest.mark.parametrize("name", ["memory", "needle", "quality"])
def test_a_cell_that_failed_is_status_1_and_the_others_are_shown(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module, results, right = MEASURED[name]
    monkeypatch.setattr(module, "measure", lambda *_: (results()[0], 1))
    for check in ("check", "crowded"):
        if hasattr(module, check):
            monkeypatch.setattr(module, check, lambda args: [True, False])
    if hasattr(module, "engines"):
        monkeypatch.setattr(module.engines, "check_length", lambda *_: None)
    assert cli.main([name, "--out", str(tmp_path), "--json"]) == 1
    assert right(json.loads(capsys.readouterr().out))


def test_generation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = [
        {"asked": "early", "answer": " 1234567", "early": "1234567", "recent": "7654321"},
        {"asked": "recent", "answer": " nothing", "early": "1234567", "recent": "7654321"},
    ]

    def run(_module: str, spec: dict, *_: object) -> dict:
        return {"spec": spec, "answers": answers, "seconds": 3.0}

    monkeypatch.setattr(generation, "cells", SimpleNamespace(run=run))
    monkeypatch.setattr(generation, "spec", lambda args, policy: {"policy": policy})
    monkeypatch.setattr(generation.engines, "check_length", lambda *_: None)
    words = ["generation", "--policies", "sink", "--out", str(tmp_path)]
    assert cli.main([*words, "--json"]) == 0
    full, sink = json.loads(capsys.readouterr().out)
    assert (full["spec"]["policy"], sink["spec"]["policy"]) == ("none", "sink")
    assert (sink["early"][0], sink["recent"][0], sink["seconds"]) == (1.0, 0.0, 3.0)
    assert cli.main(words) == 0
    rows = table.records(capsys.readouterr().out)
    assert [row["policy"] for row in rows] == ["full cache", "sink"]


def test_attention_cost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(attention_cost, "measure", lambda *_: [])
    monkeypatch.setattr(attention_cost, "table_rows", lambda _: [["1"] * 9])
    monkeypatch.setattr(attention_cost.plot, "draw", lambda *_: True)
    words = ["attention-cost", "--query-heads", "4", "--kv-heads", "2", "--out", str(tmp_path)]
    assert cli.main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["shape"][:2] == [4, 2]


def test_bench_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_kernels.rows, "tables", lambda _: ["a table"])
    monkeypatch.setattr(bench_kernels.plot, "draw", lambda *_: True)
    args = bench_kernels.parse(["--out", str(tmp_path), "--json"])
    bench_kernels.report([{"run": 1}], ["a note"], args)
    found = json.loads(capsys.readouterr().out)
    assert (found["runs"], found["notes"]) == ([{"run": 1}], ["a note"])
    assert "json" not in found["arguments"]


def test_bench(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {**result("vLLM alone", 20.0, 1.0), "spec": {"pool_bytes": 1 << 20}}
    monkeypatch.setattr(bench, "measure", lambda _: {"vLLM alone": []})
    monkeypatch.setattr(bench, "middle", lambda *_: found)
    monkeypatch.setattr(bench.machine, "about", lambda _: {})
    monkeypatch.setattr(bench.plot, "draw", lambda *_: True)
    monkeypatch.setattr(bench.engines, "check_length", lambda *_: None)
    assert cli.main(["bench", "--out", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["results"] == [found]
    assert cli.main(["bench", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert (tmp_path / "bench.md").read_text().strip() in said
    assert f"picture: {tmp_path}/bench.png" in said


def test_the_tables_of_a_calibration_are_those_of_its_json() -> None:
    found = {key: [["a", *"123456"[: len(h) - 1]]] for key, h in calibrate.HEADERS.items()}
    rows = table.records(calibrate.tables(found))
    assert [list(row) for row in rows] == list(calibrate.HEADERS.values())


def test_a_report_has_the_rows_of_its_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = table.render(["cell", "held %"], [["one", "5"]])
    chapter = chapters.Chapter(lambda _: [], lambda *_: {"first": made})
    monkeypatch.setattr(report.chapters, "CHAPTERS", {"layers": chapter})
    words = ["report", "--chapters", "layers", "--data", str(tmp_path)]
    assert cli.main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"first": [{"cell": "one", "held %": "5"}]}
    assert cli.main(words) == 0
    assert made in capsys.readouterr().out
