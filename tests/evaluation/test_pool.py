# SPDX-License-Identifier: Apache-2.0
"""Bytes of pools, and windows of equal memory."""

import json

import pytest

from entropykv_vllm.evaluation import engines, pool

SMOLLM2 = pool.Shape(layers=30, kv_heads=3, head_size=64, item_bytes=4)


def test_a_token_of_smollm2_takes_45_kib():
    assert SMOLLM2.token_bytes == 2 * 30 * 3 * 64 * 4 == 46_080


def test_a_pool_holds_its_tokens_and_the_null_block():
    assert pool.pool_bytes(SMOLLM2, 256, block_size=128) == 3 * 128 * 46_080
    assert pool.pool_bytes(SMOLLM2, 257, block_size=128) == 4 * 128 * 46_080


def test_the_shape_is_read_from_the_config(tmp_path):
    config = {"num_hidden_layers": 2, "num_attention_heads": 8, "hidden_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert pool.shape(str(tmp_path)) == pool.Shape(2, 8, 8, 4)
    config |= {"num_key_value_heads": 2, "head_dim": 16}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert pool.shape(str(tmp_path), "bfloat16") == pool.Shape(2, 2, 16, 2)


@pytest.mark.parametrize("policy", engines.POLICIES)
def test_policies_of_one_keep_ratio_use_equal_memory(policy):
    settings = engines.eviction(policy, 0.5, 2048, {"window": 256})
    old_kept = 0 if policy in engines.WINDOW_ONLY else 0.5 * (2048 - settings["window"])
    assert settings["window"] + old_kept == 256 + 0.5 * (2048 - 256)


@pytest.mark.parametrize("policy", engines.POLICIES)
def test_a_cell_is_of_16_bits_unless_it_says_otherwise(policy):
    """What the stored tables were measured with, whatever the presets become."""
    cell = {"policy": policy, "eviction": engines.eviction(policy, 0.25, 2048, {})}
    arguments = engines.policy_arguments(cell)
    settings = arguments["additional_config"]["entropykv"]
    assert (settings["bits"], settings["interval"], arguments["block_size"]) == (16, 512, 32)
    assert settings["window"] == cell["eviction"]["window"]
    cell["eviction"] = engines.eviction(policy, 0.25, 2048, {"bits": 4})
    settings = engines.policy_arguments(cell)["additional_config"]["entropykv"]
    assert settings["bits"] == (16 if policy in engines.WINDOW_ONLY else 4)


def test_stock_vllm_gets_no_arguments():
    assert engines.policy_arguments({"policy": "none", "eviction": {}}) == {}
