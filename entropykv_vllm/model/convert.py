# SPDX-License-Identifier: Apache-2.0
"""From the packaged GGUF file to a folder in Hugging Face's layout, which vLLM reads.

`fetch` runs this file as a process of its own, by its path: torch's memory goes back when it ends,
whatever its libraries print can be hushed, and an interrupt can end it at any point.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def convert(gguf: Path, out: Path) -> None:
    """Write the model, its tokenizer and its generation settings into the existing folder `out`.

    The weights are written in float32. A Q4_1 value is `d * q + m` with 16-bit `d` and `m`; of
    SmolLM2's values 18 % are bfloat16 numbers and 52 % are float16 numbers, so anything smaller
    would round a second time.
    """
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    )
    # Only what makes a chat answer stop: the file has no sampling defaults, so none are invented.
    model.generation_config = GenerationConfig(
        bos_token_id=model.config.bos_token_id,
        eos_token_id=model.config.eos_token_id,
        pad_token_id=model.config.pad_token_id,
    )
    model.save_pretrained(out)
    save_tokenizer(gguf, out, model.config.max_position_embeddings)
    tidy_config(out / "config.json")


def save_tokenizer(gguf: Path, out: Path, max_length: int) -> None:
    """Write the tokenizer of `gguf`, chat template included; `max_length` is in tokens."""
    from gguf import GGUFReader

    fields = GGUFReader(gguf).fields
    kind = fields["tokenizer.ggml.model"].contents()
    tokenizer = sentencepiece(fields) if kind == "llama" else byte_level(gguf)
    tokenizer.model_max_length = max_length
    tokenizer.save_pretrained(out)

    path = out / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    for key in ("backend", "is_local", "local_files_only"):
        settings.pop(key, None)
    # The name that transformers 4 knows too.
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")


def byte_level(gguf: Path) -> Any:
    """The tokenizer of SmolLM2."""
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # transformers does not know the pre-tokenizer that the file names ("smollm") and falls back to
    # plain byte-level splitting. SmolLM splits digits off first; without that, the blank line
    # before a number ("\n\n1.") becomes two tokens that the model has hardly seen side by side,
    # instead of the one it was trained on.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
        ]
    )
    return tokenizer


def sentencepiece(fields: Mapping[str, Any]) -> Any:
    """The tokenizer of Gemma, of which transformers makes one that tears words and has no BOS."""
    from transformers import PreTrainedTokenizerFast

    from entropykv_vllm.model import spm

    def read(name: str) -> Any:
        return fields[f"tokenizer.ggml.{name}"].contents()

    pieces = read("tokens")
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    special = {f"{short}_token": pieces[read(f"{name}_token_id")] for short, name in names.items()}
    built = spm.tokenizer(pieces, read("scores"), read("token_type"), special["bos_token"])
    return PreTrainedTokenizerFast(
        tokenizer_object=built, clean_up_tokenization_spaces=False, **special
    )


def tidy_config(path: Path) -> None:
    """Take the name of the training run out of the config, where it poses as a hub model's name."""
    config = json.loads(path.read_text())
    config.pop("_model_name_or_path", None)
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def main() -> int:
    """Convert; on failure print one line on standard output, which is kept free for that."""
    parser = argparse.ArgumentParser(description="Convert a GGUF file to a Hugging Face folder.")
    parser.add_argument("gguf", type=Path, help="the GGUF file")
    parser.add_argument("out", type=Path, help="an existing, empty folder")
    args = parser.parse_args()
    try:
        convert(args.gguf, args.out)
    except Exception as error:
        # Whatever torch, safetensors and transformers raise becomes the caller's sentence.
        print(f"{type(error).__name__}: {' '.join(str(error).split())}")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
