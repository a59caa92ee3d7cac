# SPDX-License-Identifier: Apache-2.0
"""One cell of the memory table: one request under one setting. Run by `memory`."""

from __future__ import annotations

import os
from typing import Any

from entropykv_vllm.evaluation import cells, drive, dummy, engines, pool


def pages_of(samples: list[drive.Sample], blocks: int) -> list[int]:
    """Return the pages in use after each step. vLLM's gauge does not count its null block."""
    return [round(sample.used * (blocks - 1)) for sample in samples]


def summary(
    pages: list[int], first: int, tokens: int, page_bytes: int, token_bytes: int
) -> dict[str, dict[str, float]]:
    """Return what a request held after its prompt, while decoding on average, and at most.

    Args:
        pages: held after each step that the request outlived.
        first: the step that read the end of the prompt.
        tokens: of the prompt.
        page_bytes: of a page, all its layers together.
        token_bytes: of a token in a full cache of 16 bits.
    """

    def part(held: float, length: float) -> dict[str, float]:
        used = held * page_bytes
        ratio = used / (length * token_bytes)
        return {"pages": held, "bytes": used, "ratio": ratio, "bytes a token": used / length}

    decoding = [part(held, tokens + i) for i, held in enumerate(pages[first + 1 :], 1)]
    mean = {key: sum(each[key] for each in decoding) / len(decoding) for key in decoding[0]}
    longest = tokens + len(decoding)
    return {
        "prompt": part(pages[first], tokens),
        "decode": mean,
        "peak": part(max(pages), longest),
    }


def check(peak: float, planned: int) -> None:
    """Refuse a result that breaks the promise of the plan.

    Raises:
        RuntimeError: if more pages were held than planned.
    """
    if peak > planned:
        raise RuntimeError(f"held {peak} pages at the peak, but the plan says at most {planned}")


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    """Serve the request alone and count its pages after each step."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # so that the pool can be asked
    from vllm import SamplingParams

    from entropykv_vllm.plan.schedule import peak_pages

    tokens, decode = spec["tokens"], spec["decode"]
    # The token that the prompt gives, those decoded, and one more: after it the pool is empty.
    params = SamplingParams(temperature=0, max_tokens=decode + 2, ignore_eos=True, detokenize=False)
    llm = engines.make(spec)
    groups = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config.kv_cache_groups
    prompts = dummy.prompts(1, tokens, spec["config"]["vocab_size"])
    _, samples = drive.run(llm, prompts, params)
    blocks = llm.llm_engine.vllm_config.cache_config.num_gpu_blocks
    pages = pages_of(samples[:-1], blocks)
    first = next(i for i, sample in enumerate(samples) if sample.answering)
    planned = sum(peak_pages(group.kv_cache_spec.plan, tokens + decode) for group in groups)
    page_bytes = max(g.kv_cache_spec.page_size_bytes * len(g.layer_names) for g in groups)
    token_bytes = pool.shape(spec["model"], dummy.DTYPE).token_bytes
    result = summary(pages, first, tokens, page_bytes, token_bytes)
    check(result["peak"]["pages"], planned)
    return {
        **result,
        "planned peak pages": planned,
        "page bytes": page_bytes,
        "token bytes of a full cache": token_bytes,
        "pages of the pool": blocks,
        "steps of the prompt": first + 1,
        "seconds": samples[-1].seconds,
        "pages of each step": pages,
    }


if __name__ == "__main__":
    cells.main(measure)
