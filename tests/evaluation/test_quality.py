# SPDX-License-Identifier: Apache-2.0
"""The quality table: its cells, its recorder, its rows."""

import argparse
from types import SimpleNamespace

import pytest
import torch

from entropykv_vllm.config.settings import load
from entropykv_vllm.evaluation import quality, recorder


def args(*words: str) -> argparse.Namespace:
    found = quality.parser().parse_args(words)
    found.config = {}
    return found


def test_cells_are_named_once_after_the_untouched_cache():
    assert quality.names("presets") == ["1-16", *quality.PRESETS]
    assert quality.names("grid") == list(quality.GRID)
    assert quality.names("max,0.75-4,max") == ["1-16", "max", "0.75-4"]
    for wrong in ("nonsense", "streaming", "0.5-5", "0.5"):
        with pytest.raises(argparse.ArgumentTypeError):
            quality.names(wrong)


@pytest.mark.parametrize("name", [*quality.PRESETS, *quality.GRID])
def test_the_settings_of_a_cell_are_valid_and_what_its_name_says(name):
    config = load("entropykv", quality.eviction(name, {"sinks": 2}))
    assert config.sinks == 2
    if name in quality.GRID:
        assert name == f"{config.keep:g}-{config.bits}"
    else:
        assert config == load("entropykv", {"preset": name, "sinks": 2})


def test_the_yardstick_is_stock_vllm_with_the_dtype_of_the_model(monkeypatch, tmp_path):
    config = '{"num_hidden_layers": 2, "num_attention_heads": 8, "hidden_size": 64}'
    (tmp_path / "config.json").write_text(config)
    monkeypatch.setattr(quality.engines, "model_folder", lambda model: str(tmp_path))
    full, other = (quality.spec(args(), name) for name in (quality.FULL, "max"))
    assert (full["policy"], full["engine"]["kv_cache_dtype"]) == ("none", "auto")
    assert (other["policy"], other["engine"]["kv_cache_dtype"]) == ("entropykv", "bfloat16")
    room = "kv_cache_memory_bytes"
    assert full["engine"][room] == 2 * other["engine"][room]
    assert full["yardstick"] == other["yardstick"]


def test_rows_name_the_cache():
    cells = [("none", quality.FULL, "auto"), ("entropykv", "1-16", "bfloat16")]
    results = [
        {
            "spec": {
                "policy": policy,
                "name": name,
                "eviction": {} if policy == "none" else quality.eviction(name, {}),
                "engine": {"kv_cache_dtype": dtype},
            },
            "kl": [0.0, 0.0, 0.0],
            "top1": [1.0, 1.0, 1.0],
        }
        for policy, name, dtype in cells
    ]
    numbers = ["0 (0-0)", "100 (100-100)"]
    assert quality.rows(results) == [
        ["full cache", "1", "", "float32", *numbers],
        ["full cache", "1", "16", "bfloat16", *numbers],
    ]


def test_the_recorder_writes_a_row_and_leaves_the_forced_token(tmp_path):
    forced = recorder.Forced(recorder.prefix(str(tmp_path), 3), [2, 0])
    seen = [torch.tensor([0.0, 1.0, -1.0]), torch.tensor([2.0, 0.0, 0.0])]
    forced([], torch.zeros(3))  # a part of the prompt, which the next row overwrites
    for step, logits in enumerate(seen):
        assert forced([7] * step, logits.clone()).argmax() == forced.ids[step]
    after = torch.ones(3)
    assert forced([7, 7], after) is after
    assert after.tolist() == [1, 1, 1]
    torch.testing.assert_close(
        recorder.read(str(tmp_path), 3, 2), torch.stack(seen).log_softmax(-1)
    )


def test_other_requests_are_left_alone():
    made = recorder.Recorder(None, torch.device("cpu"), False)
    assert made.new_req_logits_processor(SimpleNamespace(extra_args=None)) is None
    asked = SimpleNamespace(extra_args=recorder.Recorder.arguments("x-", [1]))
    assert isinstance(made.new_req_logits_processor(asked), recorder.Forced)
    assert recorder.NAME == quality.RECORDER
