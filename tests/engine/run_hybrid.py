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
MAX_LEN = 4096
POOL = 1 << 26


def main(folder: str) -> None:
    from vllm import LLM, SamplingParams

    from entropykv_vllm import engine_args

    (Path(folder) / "config.json").write_text(json.dumps(GEMMA))
    settings = engine_args("entropykv", **SETTINGS)
    llm = LLM(
        folder,
        dtype="float32",
        skip_tokenizer_init=True,
        load_format="dummy",
        max_model_len=MAX_LEN,
        enforce_eager=True,
        kv_cache_memory_bytes=POOL,
        **settings,
    )
    rng = random.Random(1)
    prompts = [[rng.randrange(3, 500) for _ in range(n)] for n in (1500, 700, 50)]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, detokenize=False)

    def answer(ids: list[list[int]]):
        return llm.generate([{"prompt_token_ids": i} for i in ids], params, use_tqdm=False)

    first, again = answer(prompts), answer(prompts)
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    scheduler.reset_prefix_cache()
    alone = [answer([ids])[0] for ids in prompts]
    groups = scheduler.kv_cache_config.kv_cache_groups
    config = llm.llm_engine.vllm_config
    report = {
        "groups": [[type(g.kv_cache_spec).__name__, g.layer_names] for g in groups],
        "hits": [output.num_cached_tokens for output in again],
        "pages": config.cache_config.num_gpu_blocks,
        "concurrency": config.cache_config.kv_cache_max_concurrency,
        "in_flight": config.max_in_flight_tokens,
        **{
            name: [list(output.outputs[0].token_ids) for output in outputs]
            for name, outputs in (("first", first), ("again", again), ("alone", alone))
        },
    }
    (Path(folder) / "report.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
