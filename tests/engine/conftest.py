# SPDX-License-Identifier: Apache-2.0
"""One engine with eviction for all tests here, and what vLLM without the plugin answers."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

MAX_LEN = 8192
KEEP = 0.25
MAX_TOKENS = 48


def model_folder() -> str:
    from entropykv_vllm.model import fetch_model

    return str(fetch_model(quiet=True))


def engine_options(**more) -> dict:
    return {
        "model": model_folder(),
        "dtype": "float32",
        "max_model_len": MAX_LEN,
        "enforce_eager": True,
        "max_num_batched_tokens": 8192,
        "kv_cache_memory_bytes": 1 << 29,
        **more,
    }


@dataclass
class Engine:
    """vLLM with eviction in this process, one step at a time, with its scheduler at hand."""

    llm: object
    held: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    evicted: int = 0

    def __post_init__(self) -> None:
        for tier in self.tiers:
            tier.take_counts = self._counting(tier.take_counts)

    def _counting(self, take_counts):
        """Add up the evicted tokens, which the scheduler takes at each step for its statistics."""

        def wrapper():
            counts = take_counts()
            self.evicted += counts.tokens_evicted
            return counts

        return wrapper

    @property
    def scheduler(self):
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    @property
    def tiers(self):
        return self.scheduler.kv_cache_manager.coordinator.single_type_managers

    @property
    def free_pages(self) -> int:
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    @property
    def preemptions(self) -> int:
        metrics = {metric.name: metric for metric in self.llm.get_metrics()}
        return int(metrics["vllm:num_preemptions"].value)

    def forget(self) -> None:
        """Empty the prefix cache."""
        assert self.scheduler.reset_prefix_cache()

    def add(self, request_id: str, ids: list[int], **params) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        options = {
            "temperature": 0,
            "max_tokens": MAX_TOKENS,
            "ignore_eos": True,
            "output_kind": RequestOutputKind.FINAL_ONLY,
            **params,
        }
        self.llm.llm_engine.add_request(
            request_id, {"prompt_token_ids": ids}, SamplingParams(**options)
        )

    def step(self) -> list:
        """One step; notes the pages that each request holds in each tier."""
        outputs = self.llm.llm_engine.step()
        for index, tier in enumerate(self.tiers):
            for request_id, blocks in tier.req_to_blocks.items():
                pages = sum(not block.is_null for block in blocks)
                self.held.setdefault(request_id.rsplit("-", 1)[0], []).append((index, pages))
        return outputs

    def run(self, prompts: dict[str, list[int]], **params) -> dict:
        """Answer prompts together, to the end: request id -> vLLM's output."""
        for request_id, ids in prompts.items():
            self.add(request_id, ids, **params)
        done = {}
        while self.llm.llm_engine.has_unfinished_requests():
            done |= {o.request_id: o for o in self.step() if o.finished}
        return done

    def tokens(self, prompts: list[list[int]], **params) -> list[list[int]]:
        outputs = self.run({f"p{i}": ids for i, ids in enumerate(prompts)}, **params)
        return [list(outputs[f"p{i}"].outputs[0].token_ids) for i in range(len(prompts))]


# LARA's tiers, so that several groups share the pool; and old pages in 4 bits, all of them watched.
SETTINGS = {
    "lara": {
        "bits": 16,
        "keep": KEEP,
        "window": 256,
        "interval": 512,
        "lara_keep": 0.2,
        "lara_window": 0.2,
    },
    "int4": {"preset": "long-context", "debug": True},
}


@pytest.fixture(scope="session", params=SETTINGS)
def engine(request):
    from vllm import LLM

    import entropykv_vllm

    options = engine_options(disable_log_stats=False)
    settings = entropykv_vllm.engine_args("entropykv", **SETTINGS[request.param])
    return Engine(LLM(**options, **settings))


@pytest.fixture(scope="session")
def corpus(engine):
    """English text, as tokens of the model."""
    from entropykv_vllm.evaluation import corpus as texts

    return engine.llm.get_tokenizer()(texts.text())["input_ids"]


@pytest.fixture(scope="session")
def stock(tmp_path_factory):
    """A function that answers prompts with vLLM as it is."""

    def answer(prompts: list[list[int]], max_tokens: int = MAX_TOKENS) -> list[list[int]]:
        folder = tmp_path_factory.mktemp("stock")
        job = {"engine": engine_options(), "prompts": prompts, "max_tokens": max_tokens}
        (folder / "in.json").write_text(json.dumps(job))
        environment = {**os.environ, "VLLM_PLUGINS": ""}
        script = Path(__file__).with_name("run_stock.py")
        subprocess.run(
            [sys.executable, str(script), str(folder / "in.json"), str(folder / "out.json")],
            check=True,
            env=environment,
        )
        return json.loads((folder / "out.json").read_text())

    return answer
