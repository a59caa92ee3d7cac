# SPDX-License-Identifier: Apache-2.0
"""A small random model, and one with sliding windows in some of its layers."""

import pytest
import torch


class Words:
    """A tokenizer of numbers."""

    eos_token_id = 1

    def encode(self, text, add_special_tokens=False):
        return [int(word) for word in text.split()]

    def decode(self, ids):
        return " ".join(map(str, ids))


def tiny(tmp_path_factory, kind, **more):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        kind,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=90,
        max_position_embeddings=2048,
        eos_token_id=1,
        bos_token_id=0,
        pad_token_id=0,
        initializer_range=0.4,
        **more,
    )
    folder = tmp_path_factory.mktemp(kind)
    AutoModelForCausalLM.from_config(config).eval().save_pretrained(folder)
    return folder


def load(folder):
    """The offline model of a folder without a tokenizer."""
    from entropykv_vllm.evaluation.offline import model as offline

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.AutoTokenizer.from_pretrained", lambda folder: Words())
        return offline.Model(str(folder))


@pytest.fixture(scope="session", params=["llama", "gemma3_text"])
def model(request, tmp_path_factory):
    more = {}
    if request.param == "gemma3_text":
        kinds = ["sliding_attention", "full_attention"] * 2
        more = {"sliding_window": 24, "layer_types": kinds, "query_pre_attn_scalar": 16}
    return load(tiny(tmp_path_factory, request.param, **more))


@pytest.fixture
def prompt():
    generator = torch.Generator().manual_seed(1)

    def make(tokens):
        return torch.randint(2, 90, (tokens,), generator=generator).tolist()

    return make
