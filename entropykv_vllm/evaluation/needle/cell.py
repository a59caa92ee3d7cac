# SPDX-License-Identifier: Apache-2.0
"""One cell of the needle table: one policy at one keep ratio. Run by `command`."""

from __future__ import annotations

from typing import Any

from entropykv_vllm.evaluation import cells, corpus, drive, engines, pool, prompts, scoring

ANSWER_TOKENS = 12


def held(llm: Any, samples: list[drive.Sample], spec: dict[str, Any]) -> dict[str, float]:
    """Return the bytes of the pages of a lone request over the bytes of its prompt's tokens.

    At the last step (`held`) and at most (`peak`); whole pages, so a full cache has over 100 %.
    The full cache has the numbers of the cell's hot pages: of 16 bits if `kv_cache_dtype` says so.
    """
    blocks = llm.llm_engine.vllm_config.cache_config.num_gpu_blocks
    usable = spec["engine"]["kv_cache_memory_bytes"] * (blocks - 1) / blocks  # less the null block
    dtype = spec["engine"].get("kv_cache_dtype", "float32")
    full = spec["tokens"] * pool.shape(engines.model_folder(spec["model"]), dtype).token_bytes
    used = [sample.used * usable / full for sample in samples if sample.used > 0]
    return {"held": used[-1], "peak": max(used)}


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    """Answer all prompts of a cell, the first one alone to see what a request holds."""
    from transformers import AutoTokenizer
    from vllm import SamplingParams

    tokenizer = AutoTokenizer.from_pretrained(engines.model_folder(spec["model"]))
    book = corpus.encode(tokenizer)
    cases = prompts.build(
        tokenizer, book, spec["tokens"], spec["prompts"], spec["seed"], tuple(spec["depths"])
    )
    params = SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS)
    ids = [case.ids for case in cases]
    llm = engines.make(spec)
    first, samples = drive.run(llm, ids[:1], params, "first")
    rest, _ = drive.run(
        llm, ids[1:], params, "rest", lambda count: cells.report(1 + count, len(ids))
    )
    answers = [out.outputs[0].text for out in first + rest]
    return {
        **scoring.summary(answers, [case.number for case in cases]),
        **held(llm, samples, spec),
        "answers": [
            {
                "number": case.number,
                "depth": round(case.depth, 4),
                "position": case.position,
                "answer": answer,
            }
            for case, answer in zip(cases, answers, strict=True)
        ],
    }


if __name__ == "__main__":
    cells.main(measure)
