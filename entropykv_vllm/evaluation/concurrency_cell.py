# SPDX-License-Identifier: Apache-2.0
"""One run of the concurrency benchmark. Run by `concurrency`."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from entropykv_vllm.evaluation import cells, corpus, drive, engines, prompts

WARM_UP_TOKENS = 256


def waited(samples: list[drive.Sample]) -> float:
    """Return the seconds that requests spent in the queue, all requests added up.

    Preempted requests wait in the queue too.
    """
    seconds = [0.0, *(sample.seconds for sample in samples)]
    steps = [after - before for before, after in itertools.pairwise(seconds)]
    return sum(step * sample.waiting for step, sample in zip(steps, samples, strict=True))


def counts(samples: list[drive.Sample], requests: int, output: int) -> dict[str, float]:
    """Return what the samples of a run say."""
    wall = samples[-1].seconds
    return {
        "seconds": wall,
        "output tokens/s": requests * output / wall,
        "running at most": max(sample.running for sample in samples),
        "answering at most": max(sample.answering for sample in samples),
        "mean wait in s": waited(samples) / requests,
        "pool used at most": max(sample.used for sample in samples),
    }


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    """Hand in all requests at once and run them to their end."""
    from transformers import AutoTokenizer
    from vllm import SamplingParams

    tokenizer = AutoTokenizer.from_pretrained(engines.model_folder(spec["model"]))
    cases = prompts.build(tokenizer, corpus.encode(tokenizer), spec["tokens"], spec["requests"])
    params = SamplingParams(temperature=0, max_tokens=spec["output"], ignore_eos=True)
    llm = engines.make(spec)
    drive.run(llm, [cases[0].ids[-WARM_UP_TOKENS:]], params, "warm-up")
    before = drive.metrics(llm)
    _, samples = drive.run(
        llm,
        [case.ids for case in cases],
        params,
        done=lambda count: cells.report(count, spec["requests"]),
    )
    after = drive.metrics(llm)
    cache = llm.llm_engine.vllm_config.cache_config
    return {
        **counts(samples, spec["requests"], spec["output"]),
        "preemptions": after["vllm:num_preemptions"] - before["vllm:num_preemptions"],
        "pages": cache.num_gpu_blocks,
        "page tokens": cache.block_size,
        "samples": [dataclasses.astuple(sample) for sample in samples],
    }


if __name__ == "__main__":
    cells.main(measure)
