# SPDX-License-Identifier: Apache-2.0
"""The simulation against vLLM's engine with a model, step by step.

A dozen requests with shared prefixes are read in chunks in a pool that is too small for them; what
the engine did is compared with what the simulation does with the same requests, to the page.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from entropykv_vllm.config.settings import load
from entropykv_vllm.plan.model_shape import read_shape
from entropykv_vllm.plan.pool import Evicted, Pool, eviction_pool, full_pool
from entropykv_vllm.serving.settings import page_size

from ..engine.run_hybrid import GEMMA
from .run_engine import PAGE, REQUESTS, STEP_TOKENS
from .scheduled import LLAMA, Asked, Seen, Server, replayed

pytestmark = pytest.mark.engine

MODEL = {**LLAMA, "num_hidden_layers": 6}
LARA = {"bits": 16, "keep": 0.25, "window": 96, "segment": 128, "interval": 128}
BY_HAND = [{"name": "two", "layers": "0-1", "keep": 1.0}, {"name": "four", "layers": "2-5"}]
ENGINES = {
    "full": (MODEL, None),
    "balanced": (MODEL, {"preset": "balanced"}),
    "long-context": (MODEL, {"preset": "long-context"}),
    "max": (MODEL, {"preset": "max"}),
    "lara": (MODEL, {**LARA, "lara_keep": 0.3, "lara_window": 0.3}),
    "tiers by hand": (MODEL, {"preset": "long-context", "tiers": BY_HAND}),
    "capped": (MODEL, {**LARA, "cap": 256}),
    "full and sliding": (GEMMA, None),
    "tiers and sliding": (GEMMA, LARA),
}
COUNT, ANSWER, LONGEST = 14, 60, 900
#: Pages of the pool beside those that the longest request needs, as a share of them.
SLACK = dict.fromkeys(ENGINES, 0.6) | {"full and sliding": 0.1, "tiers and sliding": 0.5}


def requests() -> list[dict]:
    """Of two families, each alike up to somewhere; one prompt comes three times."""
    rng = random.Random(7)
    begins = [[rng.randrange(3, 120) for _ in range(LONGEST)] for _ in range(2)]
    found, step = [], 0
    for number in range(COUNT):
        length, shared = rng.randint(40, LONGEST), rng.choice([0, 200, 500, LONGEST])
        prompt = begins[number % 2][: min(length, shared)]
        prompt += [rng.randrange(3, 120) for _ in range(length - len(prompt))]
        if number in (6, 11):
            prompt = found[2]["prompt"]
        found.append({"step": step, "prompt": prompt, "answer": rng.randint(1, ANSWER)})
        step += rng.choice([0, 0, 1, 2, 6])
    return found


def pool_of(model: dict, settings: dict | None) -> Pool:
    shape = read_shape(model)
    if settings is None:
        return full_pool(shape, STEP_TOKENS, PAGE)
    config = load("entropykv", settings)
    return eviction_pool(shape, config, page_size(config), 4, STEP_TOKENS)


def engine(name: str) -> dict:
    model, settings = ENGINES[name]
    pages = int((1 + SLACK[name]) * pool_of(model, settings).peak(LONGEST + ANSWER))
    return {"model": model, "settings": settings, "pages": pages, "requests": requests()}


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """What each engine did; a process that has served without us keeps vLLM's backend."""
    alone = [name for name, (_, settings) in ENGINES.items() if settings is None]
    ours = [name for name in ENGINES if name not in alone]
    return _run(tmp_path_factory, alone) | _run(tmp_path_factory, ours)


def _run(tmp_path_factory, names: list[str]) -> dict[str, dict]:
    """What some engines did, in a process of their own."""
    folder = tmp_path_factory.mktemp("engines")
    job = {"folder": str(folder), "engines": [engine(name) for name in names]}
    (folder / "job.json").write_text(json.dumps(job))
    files = [str(folder / name) for name in ("job.json", "report.json")]
    command = [sys.executable, "-m", "tests.simulation.run_engine", *files]
    subprocess.run(command, check=True, timeout=280, cwd=Path(__file__).parents[2], env=os.environ)
    return dict(zip(names, json.loads((folder / "report.json").read_text()), strict=True))


def seen_of(step: dict) -> Seen:
    """A step as it was before it went through JSON."""
    return Seen(
        [tuple(pair) for pair in step["tokens"]],
        [tuple(pair) for pair in step["admitted"]],
        step["preempted"],
        {int(number): held for number, held in step["held"].items()},
        step["free"],
        step["finished"],
        step["free_after"],
    )


@pytest.mark.parametrize("name", ENGINES)
def test_each_step_is_the_engines(reports, name):
    report, planned = reports[name], engine(name)
    pool = pool_of(*ENGINES[name])
    intervals = [table.plan.interval for table in pool.tables if isinstance(table, Evicted)]
    server = Server(
        plan=pool,
        pages=planned["pages"],
        step_tokens=STEP_TOKENS,
        requests=REQUESTS,
        interval=intervals[0] if intervals else None,
        in_flight=report["in_flight"],
    )
    asked = [
        Asked(one["step"], tuple(one["prompt"]), tuple(answer))
        for one, answer in zip(planned["requests"], report["answers"], strict=True)
    ]
    true = [seen_of(step) for step in report["seen"]]
    for place, (ours, theirs) in enumerate(zip(replayed(server, asked), true, strict=False)):
        assert ours == theirs, f"step {place} differs"
    assert len(replayed(server, asked)) == len(true) > 100


@pytest.mark.parametrize("name", ENGINES)
def test_there_was_something_to_compare(reports, name):
    steps = [seen_of(step) for step in reports[name]["seen"]]
    assert sum(len(step.finished) for step in steps) == COUNT
    assert sum(len(step.preempted) for step in steps) > 0
    assert sum(hit for step in steps for _, hit in step.admitted) > 100
    assert len(next(iter(steps[0].held.values()))) == len(pool_of(*ENGINES[name]).tables)


def test_several_page_groups_share_a_pool():
    names = "lara", "tiers by hand", "full and sliding", "tiers and sliding"
    assert all(len(pool_of(*ENGINES[name]).tables) > 1 for name in names)
