# SPDX-License-Identifier: Apache-2.0
"""A small hybrid model with random weights, in a process of its own: `run_hybrid.py FOLDER`."""

import json
import random
import sys
from pathlib import Path

GEMMA = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "num_hidden_layers": 6,
    "vocab_size": 512,
    "max_position_embeddings": 8192,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "query_pre_attn_scalar": 64,
    "hidden_activation": "gelu_pytorch_tanh",
    "torch_dtype": "float32",
}

SETTINGS = {"bits": 16, "keep": 0.5, "window": 64, "segment": 128, "interval": 128}
QUANTIZED = {"bits": 4, "keep": 0.5, "window": 32, "interval": 96}
MAX_LEN = 4096
POOL = 1 << 26
#: So few pages that all of them have held codes after some rounds of prompts.
SMALL, ROUNDS = 1 << 24, 8


class Engine:
    """An engine, and prompts to ask it."""

    def __init__(self, folder: str, pool: int, settings: dict) -> None:
        from vllm import LLM

        from entropykv_vllm import engine_args

        self.llm = LLM(
            folder,
            dtype="float32",
            skip_tokenizer_init=True,
            load_format="dummy",
            max_model_len=MAX_LEN,
            enforce_eager=True,
            kv_cache_memory_bytes=pool,
            **engine_args("entropykv", **settings),
        )
        self.scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler
        self.rng = random.Random(1)

    def prompts(self) -> list[list[int]]:
        return [[self.rng.randrange(3, 500) for _ in range(n)] for n in (1500, 700, 50)]

    def answer(self, ids: list[list[int]]):
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, detokenize=False)
        inputs = [{"prompt_token_ids": i} for i in ids]
        return self.llm.generate(inputs, params, use_tqdm=False)


def tokens(outputs) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def whole(folder: str) -> dict:
    """Pages that are evicted from and not quantized."""
    engine = Engine(folder, POOL, SETTINGS)
    prompts = engine.prompts()
    first, again = engine.answer(prompts), engine.answer(prompts)
    engine.scheduler.reset_prefix_cache()
    alone = [engine.answer([ids])[0] for ids in prompts]
    groups = engine.scheduler.kv_cache_config.kv_cache_groups
    config = engine.llm.llm_engine.vllm_config
    return {
        "groups": [[type(g.kv_cache_spec).__name__, g.layer_names] for g in groups],
        "hits": [output.num_cached_tokens for output in again],
        "pages": config.cache_config.num_gpu_blocks,
        "concurrency": config.cache_config.kv_cache_max_concurrency,
        "in_flight": config.max_in_flight_tokens,
        "first": tokens(first),
        "again": tokens(again),
        "alone": tokens(alone),
    }


def quantized(folder: str) -> dict:
    """Answers from pages that nobody has used, and from pages that have held codes."""
    engine = Engine(folder, SMALL, QUANTIZED)
    prompts = engine.prompts()
    first = engine.answer(prompts)
    for _ in range(ROUNDS):
        engine.scheduler.reset_prefix_cache()
        engine.answer(engine.prompts())
    engine.scheduler.reset_prefix_cache()
    return {"first": tokens(first), "later": tokens(engine.answer(prompts))}


def main(folder: str) -> None:
    (Path(folder) / "config.json").write_text(json.dumps(GEMMA))
    report = {"whole": whole(folder), "quantized": quantized(folder)}
    (Path(folder) / "report.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
