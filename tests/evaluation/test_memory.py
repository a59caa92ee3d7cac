# SPDX-License-Identifier: Apache-2.0
"""The memory table: what is counted, what it is divided by, and its rows."""

import json
from types import SimpleNamespace

import pytest

from entropykv_vllm.config.settings import preset_names
from entropykv_vllm.errors import RunError, UsageError
from entropykv_vllm.evaluation import dummy, engines, memory, memory_cell, presets
from entropykv_vllm.evaluation.drive import Sample


def test_the_null_block_is_not_counted():
    samples = [Sample(1.0, 1, 0, 0, used) for used in (3 / 10, 7 / 10, 0.0)]
    assert memory_cell.pages_of(samples, blocks=11) == [3, 7, 0]


def test_a_request_is_counted_after_its_prompt_while_decoding_and_at_the_peak():
    """Pages of 2 tokens and 8 bytes; a token of a full cache has 4 bytes."""
    pages = [3, 5, 2, 2, 3]  # the prompt of 8 tokens ends with the third step
    found = memory_cell.summary(pages, first=2, tokens=8, page_bytes=8, token_bytes=4)
    assert found["prompt"] == {"pages": 2, "bytes": 16, "ratio": 16 / 32, "bytes a token": 2}
    assert found["decode"]["pages"] == 2.5
    assert found["decode"]["ratio"] == pytest.approx((16 / 36 + 24 / 40) / 2)
    assert found["peak"]["pages"] == 5
    assert found["peak"]["ratio"] == pytest.approx(40 / (10 * 4))


def test_more_pages_than_planned_are_refused():
    memory_cell.check(7, 7)
    with pytest.raises(RuntimeError, match="held 8 pages"):
        memory_cell.check(8, 7)


def test_a_grid_has_all_pairs():
    assert memory.grid("1,0.5x16,4") == [(1, 16), (1, 4), (0.5, 16), (0.5, 4)]
    assert memory.grid("") == []


def result(eviction: dict, ratio: float, name: str = "a row", tokens: int = 8192) -> dict:
    part = {"pages": 9, "bytes": 4 * ratio * tokens, "ratio": ratio, "bytes a token": 512}
    spec = {"name": name, "eviction": eviction, "tokens": tokens}
    return {
        "spec": spec,
        "token bytes of a full cache": 4,
        **dict.fromkeys(("prompt", "decode", "peak"), part),
        "planned peak pages": 10,
    }


def test_rows_are_percent_of_a_full_cache():
    assert memory.rows([result({}, 0.25)]) == [
        ["a row", "8192", "25.0", "25.0", "25.0", "4.00", "512", "9", "10"]
    ]
    assert len(memory.HEADER) == 9


def test_the_grid_has_the_product_of_both_effects():
    results = [
        result({"keep": keep, "bits": bits}, ratio)
        for keep, bits, ratio in ((1.0, 16, 1.0), (1.0, 4, 0.3), (0.5, 16, 0.5), (0.5, 4, 0.16))
    ]
    rows = memory.grid_rows([*results, result({"preset": "max"}, 0.1)])
    assert rows[3] == ["0.5", "4", "8192", "16.0", "15.0", "6.25"]
    assert len(rows) == 4
    assert memory.grid_rows(results[3:])[0][4] == "–"  # neither effect was measured alone
    assert len(memory.GRID_HEADER) == len(rows[0])


def test_the_newest_tokens_do_not_count_in_what_a_longer_request_adds():
    """256 new tokens in full, and a tenth of the others."""
    results = [
        result({"keep": 0.1, "bits": 16}, (256 + 0.1 * (tokens - 256)) / tokens, tokens=tokens)
        for tokens in (1024, 4096)
    ]
    ratios = memory.grid_ratios(results)
    assert [tokens for *_, tokens in ratios] == ["1024", "4096", "1024 to 4096"]
    assert ratios[0.1, 16, "1024 to 4096"] == pytest.approx(0.1)


def test_a_cell_serves_a_model_of_the_shape_asked_for(tmp_path):
    args = memory.parser().parse_args(["--kv-heads", "2", "--head-size", "64", "--layers", "3"])
    folder = dummy.write(memory.model(args), tmp_path / "model")
    cell = memory.spec(args, folder, "streaming", 8192)
    assert cell["policy"] == "sink"
    token_bytes = 3 * 2 * 2 * 64 * 2
    assert cell["engine"]["kv_cache_memory_bytes"] >= (8192 + args.decode) * token_bytes
    assert json.loads((tmp_path / "model" / "config.json").read_text())["head_dim"] == 64


def test_all_presets_are_measured_with_their_policies():
    assert sorted(presets.PRESETS) == preset_names()
    for policy, eviction in presets.chosen(",".join(presets.PRESETS)).values():
        assert engines.policy_arguments({"policy": policy, "eviction": eviction})
    assert presets.chosen("") == {}
    with pytest.raises(UsageError, match="'fast' is not a preset"):
        presets.chosen("fast")


def test_prompts_of_random_tokens_share_no_prefix():
    first, second = dummy.prompts(2, 16, 512)
    assert len(first) == len(second) == 16
    assert first[:4] != second[:4]
    assert dummy.prompts(2, 16, 512) == [first, second]


def test_failed_cells_are_reported_and_the_rest_is_kept(tmp_path, monkeypatch):
    def run(module, spec, path):
        if spec["name"] == "max":
            raise RunError("out of luck")
        return {**result(spec["eviction"], 0.5, spec["name"]), "pages of each step": [1]}

    monkeypatch.setattr(memory, "cells", SimpleNamespace(run=run))
    status = memory.main(
        ["--presets", "max,quality", "--grid", "", "--tokens", "64", "--out", str(tmp_path)]
    )
    assert status == 1
    kept = json.loads((tmp_path / "table.json").read_text())
    assert [r["spec"]["name"] for r in kept] == ["quality"]
    assert "pages of each step" not in kept[0]
