# SPDX-License-Identifier: Apache-2.0
"""Ray Serve with two replicas, as `make serve-ray` starts it, used with OpenAI's client."""

import os
import re
import runpy
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from entropykv_vllm.evaluation import corpus
from entropykv_vllm.evaluation.processes import started
from entropykv_vllm.evaluation.server import free_port
from entropykv_vllm.serving import ray_serve

pytestmark = pytest.mark.cluster

SCRIPT = Path(__file__).parents[2] / "configs" / "ray" / "embedded.py"
PATIENCE = 600  # seconds
TEXTS, ASKED = 4, 4
CHARACTERS = 12_000  # of each text: some 2,900 tokens
CROWD, APART = 24, 0.25  # requests, seconds
LAG = 12  # seconds that metrics are late at most


@pytest.fixture(scope="module")
def app(tmp_path_factory):
    """Return the URL, and that of the metrics, of a server that ends with the tests."""
    folder = tmp_path_factory.mktemp("serve")
    port = free_port()
    env = {**os.environ, "PORT": str(port), "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    # A cluster that ran and is gone must not be asked for.
    env["RAY_ADDRESS"] = f"127.0.0.1:{free_port()}"
    with (
        (folder / "log").open("w") as log,
        started([sys.executable, str(SCRIPT)], env, log) as child,
    ):
        end = time.monotonic() + PATIENCE
        while not (found := re.search(r"metrics of each replica: (\S+)", _read(folder / "log"))):
            assert child.poll() is None, _read(folder / "log")[-4000:]
            assert time.monotonic() < end, _read(folder / "log")[-4000:]
            time.sleep(1)
        yield f"http://127.0.0.1:{port}/v1", found[1]


def _read(path: Path) -> str:
    return path.read_text()


@pytest.fixture(scope="module")
def client(app):
    import openai

    return openai.OpenAI(base_url=app[0], api_key="none", timeout=300)


def ask(client, text: str, **more):
    messages = [{"role": "user", "content": text}]
    more = {"max_tokens": 12, **more}
    return client.chat.completions.create(model="smollm2", messages=messages, temperature=0, **more)


def by_replica(metrics: str, name: str) -> dict[str, float]:
    """The samples of a metric, by replica."""
    with urllib.request.urlopen(metrics, timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    found: dict[str, float] = {}
    for line in lines:
        if line.startswith(f"ray_vllm_{name}{{"):
            replica = re.search(r'ReplicaId="(\w+)"', line)[1]
            found[replica] = found.get(replica, 0) + float(line.rpartition(" ")[2])
    return found


def test_chat_and_streaming(client):
    assert "Paris" in ask(client, "What is the capital of France?").choices[0].message.content
    chunks = list(ask(client, "What is the capital of France?", stream=True))
    assert len(chunks) > 3
    parts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "Paris" in "".join(parts)


def test_long_requests_meet_their_prefix_and_each_replica_tells_what_it_freed(app, client):
    """Ray's router sends a text to the replica that has its pages, compressed as they are."""
    text = corpus.text()
    starts = [20_000 * k for k in range(TEXTS)]
    texts = [text[start : start + CHARACTERS] for start in starts]
    for one in texts:
        ask(client, f"{one}\n\nWhat is this about?")
    questions = [f"{one}\n\nQuestion {i}: what is it about?" for i in range(ASKED) for one in texts]
    with ThreadPoolExecutor(TEXTS) as pool:  # more at once, and the router spreads them
        answers = list(pool.map(lambda question: ask(client, question), questions))
    read = sum(answer.usage.prompt_tokens for answer in answers)

    end = time.monotonic() + 60
    while sum(by_replica(app[1], "prefix_cache_hits_total").values()) < 0.7 * read:
        hits = by_replica(app[1], "prefix_cache_hits_total")
        assert time.monotonic() < end, f"{hits} of {read} tokens were in the prefix cache"
        time.sleep(2)
    freed = by_replica(app[1], "entropykv_pages_freed_total")
    assert len(freed) == 2, freed
    assert all(pages > 0 for pages in freed.values()), freed

    with ThreadPoolExecutor(len(questions)) as pool:
        answers = list(pool.map(lambda question: ask(client, f"{question} Why?"), questions))
    assert all(answer.choices[0].message.content for answer in answers)


def test_requests_that_begin_alike_do_not_all_wait_at_one_replica(app, client):
    """Ray's router alone sends all of them to the replica that has their pages."""
    text, name = corpus.text()[200_000:201_000], "request_success_total"
    time.sleep(LAG)
    before = by_replica(app[1], name)

    def question(i: int):
        # The router decides about all that wait for it before it counts any of them as sent.
        time.sleep(i * APART)
        more = {"max_tokens": 100, "extra_body": {"ignore_eos": True}}
        return ask(client, f"{text}\n\nQuestion {i}.", **more)

    with ThreadPoolExecutor(CROWD) as pool:
        list(pool.map(question, range(CROWD)))

    end, ended = time.monotonic() + 60, {}
    while sum(ended.values()) < CROWD:
        assert time.monotonic() < end, ended
        time.sleep(2)
        ended = {
            replica: count - before.get(replica, 0)
            for replica, count in by_replica(app[1], name).items()
        }
    assert sorted(count >= CROWD / 4 for count in ended.values()) == [True, True], ended


@pytest.mark.parametrize(("policy", "stored"), [("none", "auto"), ("entropykv", "bfloat16")])
def test_without_eviction_the_cache_is_as_vllm_has_it(monkeypatch, policy, stored):
    monkeypatch.setenv("KV_EVICTION", policy)
    monkeypatch.setattr(ray_serve, "build_openai_app", lambda arguments: arguments)
    (model,) = runpy.run_path(str(SCRIPT))["app"]()["llm_configs"]
    assert model["engine_kwargs"]["kv_eviction"] == policy
    assert model["engine_kwargs"]["kv_cache_dtype"] == stored
