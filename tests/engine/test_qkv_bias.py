# SPDX-License-Identifier: Apache-2.0
"""Keys with a large bias, as Qwen2 has them, survive 4 bits: their scales are per channel."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import engine_options, model_folder

pytestmark = pytest.mark.engine

# One RoPE pair of each head: of those tried, the one that the model misses least. Without the pairs
# of low frequency it finds no needles any more.
PAIR = (12, 44)
BIAS = 200.0
TOKENS = 1200
ANSWER_TOKENS = 12


def qwen2_config(llama: dict) -> dict:
    """The config of a Qwen2 model with the shapes of a Llama model."""
    same = (
        "bos_token_id",
        "eos_token_id",
        "hidden_act",
        "hidden_size",
        "intermediate_size",
        "max_position_embeddings",
        "num_attention_heads",
        "num_hidden_layers",
        "num_key_value_heads",
        "rms_norm_eps",
        "rope_parameters",
        "tie_word_embeddings",
        "vocab_size",
    )
    own = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "dtype": "float32"}
    return {**{name: llama[name] for name in same}, **own, "use_sliding_window": False}


def add_bias(weights: dict, config: dict) -> None:
    """Give q, k and v a bias: nought but for `PAIR` of the keys, which queries then leave out."""
    import torch

    size = config["hidden_size"] // config["num_attention_heads"]
    for layer in range(config["num_hidden_layers"]):
        of = f"model.layers.{layer}.self_attn.{{}}_proj.{{}}".format
        for name in "qkv":
            weights[of(name, "bias")] = torch.zeros(len(weights[of(name, "weight")]))
        for channel, sign in zip(PAIR, (1, -1), strict=True):
            weights[of("k", "bias")][channel::size] = sign * BIAS
            weights[of("q", "weight")][channel::size] = 0


@pytest.fixture(scope="module")
def biased(tmp_path_factory) -> Path:
    """The embedded model as a Qwen2 model with a large bias of the keys."""
    from safetensors.torch import load_file, save_file

    source, folder = Path(model_folder()), tmp_path_factory.mktemp("qwen2")
    config = qwen2_config(json.loads((source / "config.json").read_text()))
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(source / "model.safetensors")
    add_bias(weights, config)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(source / name, folder)
    yield folder
    shutil.rmtree(folder)  # half a gigabyte


@pytest.fixture(scope="module")
def cases(biased) -> list:
    from transformers import AutoTokenizer

    from entropykv_vllm.evaluation import corpus, prompts

    tokenizer = AutoTokenizer.from_pretrained(biased)
    return prompts.build(tokenizer, corpus.encode(tokenizer), TOKENS, 3, seed=4, depths=(0, 0.6))


def answer(folder: Path, prompts: list[list[int]], plugins: dict[str, str], **options) -> list:
    """Answer prompts in a process of its own, with stock vLLM or the plugin."""
    job = {
        "engine": engine_options(max_model_len=2048, **options),
        "prompts": prompts,
        "max_tokens": ANSWER_TOKENS,
    }
    source, target = folder / "in.json", folder / "out.json"
    source.write_text(json.dumps(job))
    script = Path(__file__).with_name("run_stock.py")
    command = [sys.executable, str(script), str(source), str(target)]
    subprocess.run(command, check=True, timeout=400, env={**os.environ, **plugins})
    return json.loads(target.read_text())


def test_a_model_with_a_large_bias_answers_in_4_bits_as_its_full_cache_does(
    biased, cases, tmp_path
):
    from transformers import AutoTokenizer

    import entropykv_vllm
    from entropykv_vllm.evaluation import scoring

    tokenizer = AutoTokenizer.from_pretrained(biased)
    ids = [case.ids for case in cases]
    ours = entropykv_vllm.engine_args("entropykv")
    settings = ours["additional_config"]["entropykv"]
    assert (settings["bits"], settings["keep"]) == (4, 1.0)
    model = {"model": str(biased)}
    # Not so for stock vLLM, which answers a float32 model's prompts from such a cache with noise.
    ours |= {"kv_cache_dtype": "bfloat16"}
    full, four = (
        [scoring.found(tokenizer.decode(tokens)) for tokens in answers]
        for answers in (
            answer(tmp_path, ids, {"VLLM_PLUGINS": ""}, **model),
            answer(tmp_path, ids, {}, **model, **ours),
        )
    )
    assert full == [case.number for case in cases], "the model does not find needles at all"
    assert four == full


def test_scales_per_token_would_lose_the_other_channels(biased, cases):
    """So that the test above can fail."""
    import torch
    from transformers import AutoModelForCausalLM

    from entropykv_vllm.evaluation.variants import OURS, Side

    model = AutoModelForCausalLM.from_pretrained(biased, dtype=torch.float32)
    with torch.inference_mode():
        cache = model(torch.tensor([cases[0].ids[:256]]), logits_to_keep=1).past_key_values
    others = [channel for channel in range(64) if channel not in PAIR]
    for layer in cache.layers:
        keys = layer.keys
        assert keys[..., PAIR].abs().mean() > 10 * keys[..., others].abs().mean()
        ours, per_token = (
            (side.roundtrip(keys, 4) - keys)[..., others].norm() / keys[..., others].norm()
            for side in (OURS, Side("token", symmetric=True))
        )
        assert ours < 0.15 < 0.6 < per_token
