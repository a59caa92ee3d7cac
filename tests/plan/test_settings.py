# SPDX-License-Identifier: Apache-2.0
"""Settings: presets, files, JSON, and errors that a person can act on."""

import json

import pytest

from entropykv_vllm.config.settings import POLICIES, EvictionConfig, load, preset_names


def test_the_default_keeps_everything_in_four_bits():
    assert load("entropykv") == load("entropykv", "balanced")
    assert (load("entropykv").bits, load("entropykv").keep) == (4, 1.0)


@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "entropykv"])
def test_other_policies_are_compared_without_quantization(policy):
    expected = load(policy, {"preset": "long-context", "bits": 16})
    assert load(policy) == expected
    assert (expected.bits, expected.keep) == (16, 0.5)
    assert load(policy, {"bits": 4}) == load(policy, "long-context")


def test_presets_are_all_valid():
    assert preset_names() == [
        "balanced",
        "extreme",
        "long-context",
        "max",
        "quality",
        "streaming",
    ]
    for name in preset_names():
        load("sink" if name == "streaming" else "entropykv", name)


def test_json_is_on_top_of_a_preset():
    config = load("norm", '{"preset": "quality", "keep": 0.9}')
    assert (config.policy, config.keep, config.bits, config.window) == ("norm", 0.9, 8, 256)


def test_a_yaml_file_is_read(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("keep: 0.3\ntiers:\n- {name: a, layers: 0-3}\n")
    assert load("keydiff", str(path)).tiers[0].layers == (0, 1, 2, 3)


def test_settings_survive_the_way_to_other_processes():
    config = load("entropykv", {"tiers": [{"name": "a", "layers": [3, 1]}], "cap": 1024})
    sent = json.loads(json.dumps(config.model_dump(mode="json", exclude_none=True)))
    assert EvictionConfig.model_validate(sent) == config


@pytest.mark.parametrize(
    ("policy", "config", "sentence"),
    [
        ("entropykv", {"keep": 0}, "keep is 0: input should be greater than 0"),
        ("entropykv", {"keep": 2}, "keep is 2: input should be less than or equal to 1"),
        ("entropykv", {"bits": 7}, "bits is 7: input should be 16, 8 or 4"),
        ("entropykv", {"segment": 0}, "segment is 0: input should be greater than 0"),
        ("entropykv", {"kep": 0.5}, "'kep' is not a setting; there are policy, keep"),
        ("entropykv", "nowhere.yaml", "neither a preset"),
        ("entropykv", "{keep: 1}", "not valid JSON"),
        ("entropykv", "streaming", "made for --kv-eviction sink, not entropykv"),
        ("lru", None, "'lru' is not a policy: choose one of entropykv"),
        ("entropykv", {"tiers": [{"name": "a", "layers": "x"}]}, "'x' is not a layer"),
        ("entropykv", {"tiers": [{"name": "a", "layers": "5-3"}]}, "'5-3' is not a layer"),
        ("entropykv", {"tiers": [{"name": "a", "layers": "0-99999999999"}]}, "is not a layer"),
        ("entropykv", {"tiers": [{"name": "a", "layers": 5}]}, "layers are a list such as"),
        ("entropykv", {"tiers": []}, "name at least one tier"),
        (
            "entropykv",
            {"tiers": [{"name": "a", "layers": "0"}, {"name": "a", "layers": "1"}]},
            "two tiers are named 'a'",
        ),
        ("entropykv", {"preset": 5}, "preset is 5: name one of balanced"),
        ("entropykv", "x" * 5000, "neither a preset"),
        ("entropykv", {"lara_keep": float("nan")}, "lara_keep is nan"),
        ("entropykv", {"lara_window": 1e308}, "lara_window is 1e.308"),
    ],
)
def test_wrong_settings_are_refused_in_one_sentence(policy, config, sentence):
    with pytest.raises(ValueError, match=sentence) as caught:
        load(policy, config)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_text_is_refused_by_name(tmp_path):
    path = tmp_path / "binary.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"binary\.yaml' is neither a preset"):
        load("entropykv", str(path))


def test_the_bits_in_use_are_those_of_the_tiers():
    assert EvictionConfig(bits=8).bits_used == {8}
    tiers = [{"name": "a", "layers": "0", "bits": 4}, {"name": "b", "layers": "1"}]
    assert load("entropykv", {"bits": 16, "tiers": tiers}).bits_used == {4, 16}
    assert load("entropykv", {"bits": 8, "tiers": tiers[:1]}).bits_used == {4}


def test_norms_choose_blocks_and_distinctness_tokens():
    chosen = {policy: EvictionConfig(policy=policy).selection for policy in POLICIES}
    assert chosen["norm"] == chosen["knorm"] == ("block", "head")
    assert chosen["entropykv"] == chosen["keydiff"] == ("token", "head")
    assert EvictionConfig(policy="norm", scope="layer").selection == ("block", "layer")
