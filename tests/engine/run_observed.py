# SPDX-License-Identifier: Apache-2.0
"""Scores that read attention, in a process of its own: `run_observed.py POLICY FOLDER`.

A small model with random weights; what is looked at are its masses, and that its answers depend on
nothing but their prompts.
"""

import json
import random
import sys
from pathlib import Path

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "torch_dtype": "float32",
}
STEPS = (2048, 100)


def main(policy: str, folder: str) -> None:
    from vllm import LLM, SamplingParams

    from entropykv_vllm import engine_args

    (Path(folder) / "config.json").write_text(json.dumps(LLAMA))
    rng = random.Random(1)
    prompts = [[rng.randrange(3, 500) for _ in range(n)] for n in (900, 400, 60)]
    params = SamplingParams(temperature=0, max_tokens=90, ignore_eos=True, detokenize=False)
    report = {}
    for step in STEPS:
        llm = LLM(
            folder,
            dtype="float32",
            skip_tokenizer_init=True,
            load_format="dummy",
            max_model_len=2048,
            max_num_batched_tokens=step,
            max_num_seqs=2 if step < 2048 else 4,
            enforce_eager=True,
            kv_cache_memory_bytes=1 << 26,
            **engine_args(policy, bits=16, keep=0.25, window=64, segment=128, interval=128),
        )
        # Alone and first, before a page was ever used: all mass there is is this request's.
        few = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
        llm.generate([{"prompt_token_ids": prompts[2]}], few, use_tqdm=False)
        worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
        layers = worker.vllm_config.compilation_config.static_forward_context.values()
        masses = [layer.entropykv_mass.sum((0, 2)).tolist() for layer in layers]
        answers = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        alone = [
            llm.generate([{"prompt_token_ids": p}], params, use_tqdm=False)[0] for p in prompts
        ]
        report[step] = {
            "masses": masses,
            **{
                name: [list(output.outputs[0].token_ids) for output in outputs]
                for name, outputs in (("together", answers), ("alone", alone))
            },
        }
        llm.llm_engine.engine_core.shutdown()
        del llm
    (Path(folder) / "report.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
