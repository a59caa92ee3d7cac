# SPDX-License-Identifier: Apache-2.0
"""One cell of the quality table: one cache beside the full one. Run by `quality`."""

from __future__ import annotations

import tempfile
from typing import Any

from entropykv_vllm.evaluation import cells, corpus, divergence, engines, passages


def texts_of(spec: dict[str, Any]) -> list[list[int]]:
    """Return the texts: prompts and, after them, the tokens to decode."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(engines.model_folder(spec["model"]))
    book, first = corpus.encode(tokenizer), passages.opening(tokenizer)
    return passages.cut(book, spec["texts"], spec["tokens"] + spec["steps"], first)


def decode(llm: Any, texts: list[list[int]], spec: dict[str, Any], folder: str) -> None:
    """Read all prompts and decode what follows; the distributions are written to `folder`."""
    from vllm import SamplingParams

    from entropykv_vllm.evaluation.recorder import Recorder, prefix

    engine, tokens = llm.llm_engine, spec["tokens"]
    for i, ids in enumerate(texts):
        asked = Recorder.arguments(prefix(folder, i), ids[tokens:])
        params = SamplingParams(
            temperature=0, max_tokens=spec["steps"], ignore_eos=True, extra_args=asked
        )
        engine.add_request(str(i), {"prompt_token_ids": ids[:tokens]}, params)
    done = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                _check(output, texts[int(output.request_id)][tokens:])
                cells.report(done := done + 1, len(texts))


def _check(output: Any, forced: list[int]) -> None:
    if list(output.outputs[0].token_ids) != forced:
        raise RuntimeError(f"text {output.request_id} was not decoded as it was to be")


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    """Decode all texts; the full cache's distributions are kept, others compared with them."""
    import numpy as np
    import torch

    from entropykv_vllm.evaluation import recorder

    texts = texts_of(spec)
    with tempfile.TemporaryDirectory() as folder:
        decode(engines.make(spec), texts, spec, folder)
        rows = [recorder.read(folder, i, spec["steps"]) for i in range(len(texts))]
    if spec["policy"] == "none":
        np.save(spec["yardstick"], torch.stack(rows).numpy())
    full = torch.from_numpy(np.load(spec["yardstick"]))
    found = [divergence.compare(a, b) for a, b in zip(full, rows, strict=True)]
    return {**divergence.summary(found), "texts": found}


if __name__ == "__main__":
    cells.main(measure)
