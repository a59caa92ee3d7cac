# SPDX-License-Identifier: Apache-2.0
"""A small model through one of vLLM's model runners: `run_runner.py JOB.json REPORT.json`."""

import json
import random
import sys
from collections import Counter
from pathlib import Path

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "num_hidden_layers": 2,
    "vocab_size": 128,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
#: Tokens of a step. Chunks of prompts end inside pages, and at boundaries.
CHUNK = 90


def make_model(folder: Path) -> None:
    """Weights so large that attention has a say in every token."""
    import torch
    from safetensors.torch import save_file

    size, inner, vocab = (
        LLAMA[name] for name in ("hidden_size", "intermediate_size", "vocab_size")
    )
    heads, kv = (
        LLAMA[f"num_{kind}_heads"] * LLAMA["head_dim"] for kind in ("attention", "key_value")
    )
    shapes = {"model.embed_tokens": (vocab, size), "lm_head": (vocab, size), "model.norm": (size,)}
    for layer in range(LLAMA["num_hidden_layers"]):
        parts = {
            "self_attn.q_proj": (heads, size),
            "self_attn.k_proj": (kv, size),
            "self_attn.v_proj": (kv, size),
            "self_attn.o_proj": (size, heads),
            "mlp.gate_proj": (inner, size),
            "mlp.up_proj": (inner, size),
            "mlp.down_proj": (size, inner),
            "input_layernorm": (size,),
            "post_attention_layernorm": (size,),
        }
        shapes |= {f"model.layers.{layer}.{part}": shape for part, shape in parts.items()}
    torch.manual_seed(1)
    made = {
        f"{name}.weight": torch.ones(shape) if len(shape) == 1 else 0.3 * torch.randn(shape)
        for name, shape in shapes.items()
    }
    save_file(made, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(LLAMA))


class Watched:
    """An engine in this process, and what its scheduler did."""

    def __init__(
        self, folder: Path, worker: str | None, tokens: int, ahead: bool, settings: dict | None
    ) -> None:
        from vllm import LLM

        from entropykv_vllm import engine_args

        options = {} if settings is None else engine_args("entropykv", **settings)
        if worker is not None:
            options["worker_cls"] = worker
        self.llm = LLM(
            str(folder),
            dtype="float32",
            skip_tokenizer_init=True,
            max_model_len=1024,
            max_num_batched_tokens=CHUNK,
            max_num_seqs=4,
            enforce_eager=True,
            kv_cache_memory_bytes=1 << 24,
            disable_log_stats=False,
            async_scheduling=ahead,
            block_size=32,
            **{k: v for k, v in options.items() if k != "block_size"},
        )
        self.core = self.llm.llm_engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.tokens = tokens
        self.seen: Counter[str] = Counter()
        if settings is not None:
            self._watch()

    def _watch(self) -> None:
        schedule, end = self.scheduler.schedule, self.scheduler._mamba_block_aligned_split

        def planned(*args, **kwargs):
            flying = {r.request_id for r in self.scheduler.running if r.num_in_flight_tokens}
            output = schedule(*args, **kwargs)
            for move in output.entropykv_moves:
                self.seen[move.kind] += 1
                self.seen["moved in flight"] += move.request_id in flying
            self.seen["preempted"] += len(output.preempted_req_ids or ())
            return output

        def ended(*args, **kwargs):
            tokens = end(*args, **kwargs)
            self.seen["waited"] += tokens == 0
            return tokens

        self.scheduler.schedule, self.scheduler._mamba_block_aligned_split = planned, ended

    def answer(self, prompts: list[list[int]]) -> list:
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0, max_tokens=self.tokens, ignore_eos=True, detokenize=False
        )
        inputs = [{"prompt_token_ids": ids} for ids in prompts]
        return self.llm.generate(inputs, params, use_tqdm=False)

    def answer_tightly(self, prompts: list[list[int]]) -> list:
        """With pages for the longest alone, so that not all find room to the end."""
        from entropykv_vllm.plan.schedule import peak_pages

        self.scheduler.reset_prefix_cache()
        pool = self.scheduler.kv_cache_manager.block_pool
        longest = max(map(len, prompts)) + self.tokens
        room = sum(peak_pages(tier.plan, longest) for tier in self.scheduler._tiers)
        kept_back = pool.get_new_blocks(pool.get_num_free_blocks() - room)
        try:
            return self.answer(prompts)
        finally:
            pool.free_blocks(kept_back)

    def report(self, prompts: list[list[int]], rounds: list[str]) -> dict:
        """What the engine answers in some of the rounds, and how it came to it."""
        ways = {"together": self.answer, "again": self.answer, "tight": self.answer_tightly}
        outputs = {name: ways[name](prompts) for name in rounds}
        self.scheduler.reset_prefix_cache()
        pool = self.scheduler.kv_cache_manager.block_pool
        runner = self.core.model_executor.driver_worker.worker.model_runner
        return {
            "runner": f"{type(runner).__module__}.{type(runner).__name__}",
            "scheduler": type(self.scheduler).__name__,
            "free": pool.get_num_free_blocks() == pool.num_gpu_blocks - 1,
            "hits": [output.num_cached_tokens for output in outputs["again"]],
            "seen": self.seen,
            "answers": {
                name: [list(output.outputs[0].token_ids) for output in answers]
                for name, answers in outputs.items()
            },
        }


def prompts() -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(3, 125) for _ in range(n)] for n in (500, 260, 40)]


def main(job_file: str, report_file: str) -> None:
    job = json.loads(Path(job_file).read_text())
    worker = None
    if job["v2"]:
        from tests.serving import interpreter

        interpreter.install()
        from tests.engine import runners

        runners.choose_v2()
        runners.allow_ahead()
        worker = runners.WORKERS["gpu" if job["as_gpus"] else "cpu"]
        if job["as_gpus"]:
            runners.attend_as_gpus()
    folder = Path(job_file).parent
    make_model(folder)
    reports = []
    for engine in job["engines"]:
        watched = Watched(folder, worker, job["tokens"], **engine)
        # Only ours knows how many pages are few.
        rounds = job["rounds"] if engine["settings"] else job["rounds"][:2]
        reports.append(watched.report(prompts(), rounds))
        watched.core.shutdown()
        del watched
    Path(report_file).write_text(json.dumps(reports))


if __name__ == "__main__":
    main(*sys.argv[1:])
