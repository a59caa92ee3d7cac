# SPDX-License-Identifier: Apache-2.0
"""One cell of an evaluation through the engine: one setting. Run by `engine`."""

from __future__ import annotations

import math
import tempfile
from typing import Any

from entropykv_vllm.evaluation import cells, drive, engines
from entropykv_vllm.evaluation.eval import score, texts
from entropykv_vllm.evaluation.eval.jobs import DIVERGENCE
from entropykv_vllm.evaluation.needle.cell import held
from entropykv_vllm.evaluation.tasks import TASKS


def answers(tokenizer: Any, spec: dict[str, Any]) -> dict[str, Any]:
    """Answer all prompts, the first one alone to see what a request holds."""
    from vllm import SamplingParams

    task, cases = TASKS[spec["task"]], texts.cases(tokenizer, spec)
    ids = [case.context + case.question + case.primer for case in cases]
    params = SamplingParams(temperature=0, max_tokens=task.answer_tokens)
    llm = engines.make(spec)
    first, samples = drive.run(llm, ids[:1], params, "first")
    rest, _ = drive.run(
        llm, ids[1:], params, "rest", lambda count: cells.report(1 + count, len(ids))
    )
    found = [out.outputs[0].text for out in first + rest]
    sizes = {**spec["engine"], "kv_cache_dtype": _dtype(spec)}
    return {
        **score.summary(task, cases, found),
        **held(llm, samples, {**spec, "engine": sizes, "tokens": len(ids[0])}),
    }


def _dtype(spec: dict[str, Any]) -> str:
    return str(spec["engine"]["kv_cache_dtype"]).replace("auto", "float32")


def divergence(tokenizer: Any, spec: dict[str, Any]) -> dict[str, Any]:
    """Decode all texts; the full cache's distributions are kept, others compared with them."""
    import numpy as np
    import torch

    from entropykv_vllm.evaluation import divergence, quality_cell, recorder

    made = texts.texts(tokenizer, spec)
    with tempfile.TemporaryDirectory() as folder:
        quality_cell.decode(engines.make(spec), made, spec, folder)
        rows = [recorder.read(folder, i, spec["steps"]) for i in range(len(made))]
    if spec["policy"] == "none":
        np.save(spec["yardstick"], torch.stack(rows).numpy())
    full = torch.from_numpy(np.load(spec["yardstick"]))
    found = [divergence.compare(a, b) for a, b in zip(full, rows, strict=True)]
    surprise = [
        -float(row[step, token])
        for row, ids in zip(rows, made, strict=True)
        for step, token in enumerate(ids[spec["tokens"] :])
    ]
    return {
        **divergence.summary(found),
        "perplexity": math.exp(sum(surprise) / len(surprise)),
        "texts": found,
    }


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    """Measure a cell of either kind."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(engines.model_folder(spec["model"]))
    if spec["task"] == DIVERGENCE:
        return divergence(tokenizer, spec)
    return answers(tokenizer, spec)


if __name__ == "__main__":
    cells.main(measure)
