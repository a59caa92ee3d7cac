# SPDX-License-Identifier: Apache-2.0
"""One cell of the generation table. Run by `generation`."""

from __future__ import annotations

import random
import time
from typing import Any

from entropykv_vllm.evaluation import cells, corpus, engines, passages

ANSWER_TOKENS = 12

EARLY = " The secret number of the lighthouse is {number}."
RECENT = " The telephone number of the harbour is {number}."
ASKED = {
    "early": "\n\nThe secret number of the lighthouse is",
    "recent": "\n\nThe telephone number of the harbour is",
}
#: Tokens between the recent fact and the question.
SINCE = 48


def cases(spec: dict[str, Any], tokenizer: Any) -> list[dict[str, Any]]:
    """Make two requests of each text: prompt, tokens to decode, and the numbers."""
    rng = random.Random(0)
    book, first = corpus.encode(tokenizer), passages.opening(tokenizer)
    found = []
    for text in passages.cut(book, spec["texts"], spec["prompt"] + spec["generated"], first):
        numbers = {side: str(rng.randrange(1_000_000, 10_000_000)) for side in ASKED}
        early = tokenizer.encode(EARLY.format(number=numbers["early"]), add_special_tokens=False)
        late = tokenizer.encode(RECENT.format(number=numbers["recent"]), add_special_tokens=False)
        prompt = text[: spec["prompt"] - len(early)] + early
        more = text[spec["prompt"] : spec["prompt"] + spec["generated"] - len(late)]
        decoded = more[:-SINCE] + late + more[-SINCE:]
        for side, question in ASKED.items():
            asked = tokenizer.encode(question, add_special_tokens=False)
            found.append({"ids": prompt, "forced": decoded + asked, "asked": side, **numbers})
    return found


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    """Decode all texts and answer."""
    from transformers import AutoTokenizer
    from vllm import SamplingParams

    from entropykv_vllm.evaluation.recorder import Recorder

    tokenizer = AutoTokenizer.from_pretrained(engines.model_folder(spec["model"]))
    asked = cases(spec, tokenizer)
    llm = engines.make(spec)
    engine, began = llm.llm_engine, time.perf_counter()
    for i, case in enumerate(asked):
        params = SamplingParams(
            temperature=0,
            max_tokens=len(case["forced"]) + ANSWER_TOKENS,
            extra_args=Recorder.arguments(None, case["forced"]),
        )
        engine.add_request(str(i), {"prompt_token_ids": case["ids"]}, params)
    answers: list[dict[str, Any]] = [{} for _ in asked]
    done = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                case, i = asked[int(output.request_id)], int(output.request_id)
                answers[i] = _answer(case, list(output.outputs[0].token_ids), tokenizer)
                cells.report(done := done + 1, len(asked))
    return {"answers": answers, "seconds": time.perf_counter() - began}


def _answer(case: dict[str, Any], ids: list[int], tokenizer: Any) -> dict[str, Any]:
    forced = len(case["forced"])
    if ids[:forced] != case["forced"]:
        raise RuntimeError("a text was not decoded as it was to be")
    answer = tokenizer.decode(ids[forced:], skip_special_tokens=True)
    return {**{side: case[side] for side in ASKED}, "asked": case["asked"], "answer": answer}


if __name__ == "__main__":
    cells.main(measure)
