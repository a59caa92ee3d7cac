# SPDX-License-Identifier: Apache-2.0
"""What one process answers, to which every way of spreading the model is held."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from entropykv_vllm.evaluation import corpus

from ..engine.conftest import model_folder

#: LARA's tiers, so that each of the two pipeline stages has layers of several page groups; the
#: prompts meet in one batch and are collapsed several times.
SETTINGS = {"bits": 4, "keep": 0.25, "window": 256, "lara_keep": 0.2, "lara_window": 0.2}
LENGTHS = (2600, 300, 1500)
TOKENS = 24
RUN = Path(__file__).parent.parent / "engine" / "run_stock.py"


@pytest.fixture(scope="session", autouse=True)
def a_thread_each():
    """Several workers share the cores; with more threads than cores they wait for each other."""
    before = os.environ["OMP_NUM_THREADS"]
    os.environ["OMP_NUM_THREADS"] = "1"
    yield
    os.environ["OMP_NUM_THREADS"] = before


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(model_folder())(corpus.text())["input_ids"]
    return [ids[700 * i : 700 * i + length] for i, length in enumerate(LENGTHS)]


@pytest.fixture(scope="session")
def answers(prompts, tmp_path_factory):
    """Return a function that answers the prompts with an engine of its own."""
    from entropykv_vllm import engine_args

    def answer(address: str | None = None, **more) -> list[list[int]]:
        folder = tmp_path_factory.mktemp("answers")
        engine = {
            "model": model_folder(),
            "dtype": "float32",
            "max_model_len": 4096,
            "enforce_eager": True,
            "kv_cache_memory_bytes": 1 << 28,
            **engine_args("entropykv", **SETTINGS),
            **more,
        }
        job = {"engine": engine, "prompts": prompts, "max_tokens": TOKENS}
        (folder / "in.json").write_text(json.dumps(job))
        env = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
        env |= {"RAY_ADDRESS": address} if address else {}
        command = [sys.executable, str(RUN), str(folder / "in.json"), str(folder / "out.json")]
        run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=400)
        assert run.returncode == 0, run.stderr[-4000:]
        return json.loads((folder / "out.json").read_text())

    return answer


@pytest.fixture(scope="session")
def alone(answers) -> list[list[int]]:
    """What one process answers."""
    return answers()
