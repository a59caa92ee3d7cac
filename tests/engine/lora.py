# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters with random weights, for the small model of `run_runner`."""

import json
from pathlib import Path

from .run_runner import LLAMA

RANK = 8


def make_adapter(folder: Path, number: int):
    """A request for an adapter of the queries and values, which is made in `folder`."""
    import torch
    from safetensors.torch import save_file
    from vllm.lora.request import LoRARequest

    place = folder / f"adapter{number}"
    place.mkdir()
    torch.manual_seed(number)
    size, head = LLAMA["hidden_size"], LLAMA["head_dim"]
    outputs = {
        "q_proj": LLAMA["num_attention_heads"] * head,
        "v_proj": LLAMA["num_key_value_heads"] * head,
    }
    weights = {}
    for layer in range(LLAMA["num_hidden_layers"]):
        for name, width in outputs.items():
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}.lora_{{}}.weight".format
            weights[at("A")] = 0.3 * torch.randn(RANK, size)
            weights[at("B")] = 0.3 * torch.randn(width, RANK)
    save_file(weights, place / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": [*outputs]}
    (place / "adapter_config.json").write_text(json.dumps(config))
    return LoRARequest(place.name, number, str(place))
