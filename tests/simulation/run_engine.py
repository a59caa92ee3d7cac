# SPDX-License-Identifier: Apache-2.0
"""vLLM's engine with a small model of random weights, step by step: `run_engine.py JOB REPORT`.

A job names a folder, and engines with a model's configuration, the pages of their pool and requests
that come at steps; the report has what each of them did.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.simulation.scheduled import Watched, number_of

#: Tokens of a step; chunks of prompts end inside pages, and at boundaries.
STEP_TOKENS = 300
#: Requests of a step.
REQUESTS = 6
MAX_LEN = 1000
#: Tokens of a page of vLLM alone.
PAGE = 32


def make_engine(folder: Path, settings: dict[str, Any] | None, pages: int):
    """An engine in this process; without settings, vLLM alone."""
    from vllm import LLM

    from entropykv_vllm import engine_args

    ours = {"block_size": PAGE} if settings is None else engine_args("entropykv", **settings)
    return LLM(
        str(folder),
        dtype="float32",
        skip_tokenizer_init=True,
        load_format="dummy",
        max_model_len=MAX_LEN,
        max_num_batched_tokens=STEP_TOKENS,
        max_num_seqs=REQUESTS,
        enforce_eager=True,
        kv_cache_memory_bytes=1 << 26,
        num_gpu_blocks_override=pages + 1,
        disable_log_stats=False,
        **ours,
    )


def drive(llm, requests: list[dict[str, Any]]) -> dict[str, Any]:
    """Send each request at its step; what the engine did, and what it answered."""
    from vllm import SamplingParams

    engine = llm.llm_engine
    watched = Watched(engine.engine_core.engine_core.scheduler)
    answers: dict[int, list[int]] = {}
    turn = 0
    while len(answers) < len(requests):
        for number, one in enumerate(requests):
            if one["step"] == turn:
                params = SamplingParams(
                    temperature=0, max_tokens=one["answer"], ignore_eos=True, detokenize=False
                )
                engine.add_request(f"r{number}", {"prompt_token_ids": one["prompt"]}, params)
        for output in engine.step():
            if output.finished:
                answers[number_of(output.request_id)] = list(output.outputs[0].token_ids)
        turn += 1
    return {
        "in_flight": engine.vllm_config.max_in_flight_tokens,
        "seen": [asdict(step) for step in watched.seen],
        "answers": [answers[number] for number in range(len(requests))],
    }


def main(job_file: str, report_file: str) -> None:
    job = json.loads(Path(job_file).read_text())
    reports = []
    for i, engine in enumerate(job["engines"]):
        folder = Path(job["folder"]) / str(i)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(engine["model"]))
        llm = make_engine(folder, engine["settings"], engine["pages"])
        reports.append(drive(llm, engine["requests"]))
        llm.llm_engine.engine_core.shutdown()
        del llm
    Path(report_file).write_text(json.dumps(reports))


if __name__ == "__main__":
    main(*sys.argv[1:])
