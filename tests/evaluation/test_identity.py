# SPDX-License-Identifier: Apache-2.0
"""Models in folders of one name have results of their own; fetched ones keep those they had."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from entropykv_vllm.evaluation import calibrate, generation, identity, quality
from entropykv_vllm.evaluation.calibration import check, scan
from entropykv_vllm.evaluation.calibration.run import Texts, _spec
from entropykv_vllm.evaluation.needle import command
from entropykv_vllm.model.fetch import NAME

CONFIG = {
    "max_position_embeddings": 4096,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "hidden_size": 512,
}


@pytest.fixture
def make(tmp_path):
    """Makes a model's folder in a folder of its own."""

    def made(place, weights=bytes(1_000_000), **config):
        folder = tmp_path / place / "mine"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
        (folder / "model.safetensors").write_bytes(weights)
        return str(folder)

    return made


def test_a_copy_is_the_same_and_all_else_is_not(make):
    first = identity.weights(make("a"))
    assert identity.weights(make("b")) == first
    tuned = bytes(500_000) + b"x" * 10_000 + bytes(490_000)
    others = [
        identity.weights(make("c", tuned)),
        identity.weights(make("d", bytes(999_999))),
        identity.weights(make("e", vocab_size=1)),
        identity.weights(make("f", b"")),
    ]
    assert len({first, *others}) == 5


def test_what_is_fetched_by_name_keeps_its_specification():
    assert identity.marks(NAME) == {}
    assert identity.folder(NAME) == NAME


def test_commands_tell_models_of_one_folder_name_apart(make):
    one, other = make("a"), make("b", bytes(10))

    def specs(model):
        net = SimpleNamespace(folder=model)
        args = command.parser().parse_args(["--model", model])
        words = ["--model", model, "--out", "x"]
        return [
            _spec(net, model, [[1]], Texts(1024, 1), scan.cells([0]), "bfloat16"),
            {**command.spec(args, "none", 1.0), "model": ""},
            {**quality.spec(quality.parser().parse_args(words), "full"), "model": ""},
            {**generation.spec(generation.parser().parse_args(words), "none"), "model": ""},
        ]

    assert all(a != b for a, b in zip(specs(one), specs(other), strict=True))


def test_results_have_a_folder_of_their_own(make, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folders = []
    for model in (make("a"), make("b", bytes(10))):
        args = calibrate.parser().parse_args(["--texts", "1", model])
        check.check(args, "calibrate")
        folders.append(args.out)
    assert len(set(folders)) == 2
    assert all(folder.parent == Path("results/calibrate") for folder in folders)
    assert all(folder.name.startswith("mine-") for folder in folders)
