# SPDX-License-Identifier: Apache-2.0
"""What scores that read attention cost: the ways agree, and the figures are what they say."""

import json

import pytest
import torch

from entropykv_vllm.evaluation import resident
from entropykv_vllm.evaluation.attention_cost import cell, command

SHAPE = {"shape": [4, 2, 16]}


def layer(tokens, query_heads=4, heads=2, size=16):
    query = torch.randn(tokens, query_heads, size)
    return query, *torch.randn(2, tokens, heads, size)


def naive_masses(query, keys):
    """What all queries give to each token, query by query."""
    mass = torch.zeros(keys.shape[1], len(keys))
    group = query.shape[1] // keys.shape[1]
    for i, heads in enumerate(query):
        for h, q in enumerate(heads):
            seen = keys[: i + 1, h // group]
            mass[h // group, : i + 1] += (seen @ q * q.shape[0] ** -0.5).softmax(0) / group
    return mass


def test_the_matrix_sums_to_masses():
    query, keys, _ = layer(40)
    expected = naive_masses(query, keys)
    torch.testing.assert_close(cell.matrix(query, keys), expected)


def test_the_side_table_holds_the_same_masses():
    query, keys, values = layer(1024)
    cache = cell.pages_of(keys, values)
    mass = cell.side_table(query, cache).transpose(0, 1).flatten(1)
    torch.testing.assert_close(mass, cell.matrix(query, keys), atol=1e-4, rtol=1e-4)


def test_the_attention_free_way_needs_nothing_but_the_pages():
    _, keys, values = layer(1024)
    cache = cell.pages_of(keys, values)
    before = cache.clone()
    cell.attention_free(cache)
    changed = (cache != before).flatten(1).any(1)
    assert changed.view(2, -1)[:, :8].all()  # the better half of each segment of 512
    assert not changed.view(2, -1)[:, 8:].any()


def test_growth_is_that_of_the_peak_even_if_it_is_freed():
    def call():
        torch.ones(200 << 20, dtype=torch.uint8)

    assert resident.growth(call) == pytest.approx(200 << 20, rel=0.1)


def test_memory_that_was_freed_before_counts_as_new():
    for megabytes in (24, 20, 20):  # the allocator keeps pieces of this size for the next call
        torch.ones(megabytes << 20, dtype=torch.uint8)
    found = resident.growth(lambda: torch.ones(20 << 20, dtype=torch.uint8))
    assert found == pytest.approx(20 << 20, rel=0.1)


def test_a_matrix_passes_a_limit_at_the_first_length_that_is_larger():
    for heads, limit in ((9, 8e9), (32, 24e9), (1, 400)):
        tokens = command.passes(heads, limit)
        assert command.matrix_bytes(heads, tokens) > limit
        assert command.matrix_bytes(heads, tokens - 1) <= limit


def test_lengths_double_up_to_the_longest():
    assert command.lengths(8192) == [1024, 2048, 4096, 8192]
    assert command.lengths(5000) == [1024, 2048, 4096]


def test_matrices_that_do_not_fit_are_computed_only(tmp_path, monkeypatch, capsys):
    ran = []

    def run(module, spec, path):
        path.parent.mkdir(parents=True, exist_ok=True)
        ran.append((spec["way"], spec["tokens"]))
        return {"bytes": 3e6, "processor seconds": {"median": 0.5}, "threads": 1}

    monkeypatch.setattr(command.cells, "run", run)
    # 2 * 4 heads * 1024 ** 2 * 4 bytes and a mask are 35 MB, and 138 MB at twice the length.
    words = ["--query-heads", "4", "--kv-heads", "2", "--longest", "2048", "--memory", "0.1"]
    assert command.main([*words, "--out", str(tmp_path)]) == 0
    assert [way for way, tokens in ran if tokens == 2048] == ["table", "free"]
    assert ("matrix", 1024) in ran
    output = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("|")] for line in output.splitlines()]
    assert ["2048", "67", "–", "–", "0.02", "3.00", "0.5", "3.00", "0.5"] in [r[1:-1] for r in rows]
    assert "passes 8 GB at 22,361 and 24 GB at 38,730 tokens" in output
    report = json.loads((tmp_path / "table.json").read_text())
    assert report["rows"][0]["matrix"] == 4 * 1024**2 * 4
    assert report["rows"][1]["table"] == 2 * 2048 * 4


@pytest.mark.parametrize("way", command.WAYS)
def test_a_cell_measures_its_way(way):
    found = cell.measure({"way": way, "tokens": 1024, **SHAPE})
    assert found["seconds"]["median"] > 0
    assert found["processor seconds"]["median"] > 0
    if way == "matrix":  # logits and weights of 16 MB each
        assert found["bytes"] > 30e6
