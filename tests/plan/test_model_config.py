# SPDX-License-Identifier: Apache-2.0
"""Where the config.json of a model is looked for, and what is said where it is not."""

from __future__ import annotations

import json
import os

import pytest

from entropykv_vllm.plan.model_config import find_model, known_models


@pytest.fixture(autouse=True)
def hub(tmp_path, monkeypatch):
    """A cache of the hub of this test's own, and no network."""
    cache = tmp_path / "hub"
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    import huggingface_hub

    def offline(*_args, **_options):
        raise ConnectionError("no network")

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", offline)
    return cache


def snapshot(hub, model: str, revision: str, layers: int):
    folder = hub / f"models--{model.replace('/', '--')}"
    path = folder / "snapshots" / revision / "config.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"num_hidden_layers": layers}))
    return path


def test_a_folder_and_a_file_are_read(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"num_hidden_layers": 3}')
    assert find_model(str(tmp_path)) == (str(tmp_path), {"num_hidden_layers": 3})
    assert find_model(str(path)) == (str(path), {"num_hidden_layers": 3})


def test_the_cache_goes_before_what_is_shipped_and_its_main_before_others(hub):
    name = "Qwen/Qwen2.5-7B-Instruct"
    newest = snapshot(hub, name, "bbb", 2)
    assert find_model(name)[1] == {"num_hidden_layers": 2}
    os.utime(newest, (2e9, 2e9))
    snapshot(hub, name, "aaa", 1)
    assert find_model(name)[1] == {"num_hidden_layers": 2}
    refs = hub / "models--Qwen--Qwen2.5-7B-Instruct" / "refs"
    refs.mkdir()
    (refs / "main").write_text("aaa\n")
    assert find_model(name)[1] == {"num_hidden_layers": 1}


@pytest.mark.parametrize("variable", ["HF_HOME", "XDG_CACHE_HOME"])
def test_the_cache_is_where_the_hubs_own_variables_say(variable, tmp_path, monkeypatch):
    monkeypatch.delenv("HF_HUB_CACHE")
    monkeypatch.delenv("HF_HOME", raising=False)
    monkeypatch.setenv(variable, str(tmp_path))
    home = tmp_path if variable == "HF_HOME" else tmp_path / "huggingface"
    snapshot(home / "hub", "some/model", "aaa", 5)
    assert find_model("some/model")[1] == {"num_hidden_layers": 5}


@pytest.mark.parametrize("word", ["Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b-instruct"])
def test_shipped_models_are_found_by_their_names(word):
    name, config = find_model(word)
    assert name == "Qwen/Qwen2.5-7B-Instruct"
    assert config == known_models()[name]


def test_any_other_is_fetched_once_and_only_its_config(tmp_path, monkeypatch):
    import huggingface_hub

    asked = []
    path = tmp_path / "config.json"
    path.write_text('{"num_hidden_layers": 3}')

    def download(model: str, file: str) -> str:
        asked.append((model, file))
        return str(path)

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", lambda url, timeout: None)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert find_model("some/model") == ("some/model", {"num_hidden_layers": 3})
    assert asked == [("some/model", "config.json")]


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ("some/model", r"could not be fetched \(ConnectionError\): give the folder"),
        ("Qwen/Qwen2.5-7B-Instrct", r"did you mean Qwen/Qwen2.5-7B-Instruct\?"),
        ("Qwen/Qwen2.5-7B", r"did you mean Qwen/Qwen2.5-7B-Instruct\?"),
        ("qwen2.5-7b", r"did you mean Qwen/Qwen2.5-7B-Instruct\?"),
        ("", "there is no '': give a model's folder"),
        ("a" * 5000, "cannot be looked for on this disk: File name too long"),
        ("~nobody-of-this-name/model", "cannot be looked for on this disk: Could not determine"),
        ("./nowhere", "there is no './nowhere'"),
        ("nowhere/config.json", "there is no 'nowhere/config.json'"),
        ("{folder}", "there is no config.json in"),
        ("{folder}/text.json", "is not a config.json that can be read"),
        ("{folder}/deep.json", "is not a config.json that can be read"),
        ("{folder}/list.json", "is not the config.json of a model"),
    ],
)
def test_what_is_not_there_is_said_in_one_sentence(model, sentence, tmp_path):
    (tmp_path / "text.json").write_text("hello")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(ValueError, match=sentence) as caught:
        find_model(model.format(folder=tmp_path))
    assert "\n" not in str(caught.value)
