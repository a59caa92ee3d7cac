# SPDX-License-Identifier: Apache-2.0
"""The plugin behind vLLM's HTTP server, used as a person would."""

import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from entropykv_vllm.evaluation import corpus, prompts
from entropykv_vllm.evaluation.server import SERVED_NAME, counters, serving

from .conftest import model_folder

pytestmark = pytest.mark.engine

TOKENS = 6200


@pytest.fixture(scope="module")
def server():
    # In a server the engine has a process of its own; one in development can be told to forget.
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_SERVER_DEV_MODE": "1"}
    settings = '{"bits": 16, "keep": 0.5, "window": 256, "interval": 512}'
    arguments = ["--kv-eviction", "entropykv", "--kv-eviction-config", settings]
    try:
        with serving(model_folder(), [*arguments, "--enforce-eager"]) as (url, log):
            yield url, log
    finally:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        del os.environ["VLLM_SERVER_DEV_MODE"]


@pytest.fixture(scope="module")
def question() -> dict:
    """A chat with a 7-digit number in the middle of more than 6,000 tokens of English."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder())
    sentences = corpus.encode(tokenizer)
    case = prompts.build(tokenizer, sentences, TOKENS, 1, depths=(0.5, 0.5), question="")[0]
    text = tokenizer.decode(case.ids)
    ask = "What is the secret number of the lighthouse?"
    return {
        "model": SERVED_NAME,
        "temperature": 0,
        "max_tokens": 16,
        "messages": [
            {"role": "user", "content": text},
            {"role": "assistant", "content": "I have read the text."},
            {"role": "user", "content": ask},
            {"role": "assistant", "content": "The secret number of the lighthouse is"},
        ],
        "add_generation_prompt": False,
        "continue_final_message": True,
    }


def post(url: str, body: dict, path: str = "/v1/chat/completions"):
    request = urllib.request.Request(
        url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    return urllib.request.urlopen(request, timeout=300)


def test_a_long_chat_is_answered_in_form_and_found_again(server, question):
    url, log = server
    with post(url, question) as response:
        first = json.load(response)
    assert re.search(r"\d", first["choices"][0]["message"]["content"])
    assert first["usage"]["prompt_tokens"] > 6000
    before = counters(url)
    assert before["vllm:entropykv_pages_freed_total"] > 0
    assert before["vllm:entropykv_tokens_evicted_total"] > 0

    with post(url, {**question, "stream": True}) as response:
        lines = [line.decode().removeprefix("data: ") for line in response if line.strip()]
    assert lines[-1].strip() == "[DONE]"
    deltas = [json.loads(line)["choices"][0]["delta"] for line in lines[:-1]]
    streamed = "".join(delta.get("content") or "" for delta in deltas)
    assert streamed == first["choices"][0]["message"]["content"]

    after = counters(url)
    hits = "vllm:prefix_cache_hits_total"
    assert after[hits] - before[hits] == first["usage"]["prompt_tokens"] // 32 * 32
    assert after["vllm:entropykv_pages"] == 0, "finished requests hold no pages"
    assert "EntropyKV tier all: layers 0,1,2" in log.read_text()


def test_wrong_requests_get_an_answer_and_the_server_goes_on(server, question):
    url, _ = server
    for wrong in ({"temperature": -1}, {"max_tokens": -5}, {"messages": "no"}):
        with pytest.raises(urllib.error.HTTPError) as caught:
            post(url, {**question, **wrong})
        assert caught.value.code == 400
    for wish in ({"kv_eviction": "h2o"}, {"kv_keep": 0}, {"kv_protect": [4]}, {"kv_protect": 0.5}):
        for stream in (False, True):
            with pytest.raises(urllib.error.HTTPError) as caught:
                post(url, {**question, "stream": stream, "vllm_xargs": wish})
            assert caught.value.code == 400
            assert next(iter(wish)) in json.load(caught.value)["error"]["message"]
    too_long = {"model": SERVED_NAME, "prompt": [5] * 9000}
    with pytest.raises(urllib.error.HTTPError) as caught:
        post(url, too_long, "/v1/completions")
    assert caught.value.code == 400
    short = {"model": SERVED_NAME, "prompt": "The capital of France is", "max_tokens": 4}
    with post(url, {**short, "seed": 3, "temperature": 0.5}, "/v1/completions") as response:
        assert json.load(response)["choices"][0]["text"]


def test_a_protected_message_is_never_evicted(server):
    """A system prompt that holds a code, under a limit that keeps next to nothing else."""
    url, _ = server
    code = "The secret code of the vault is 7261904."
    chat = {
        "model": SERVED_NAME,
        "temperature": 0,
        "max_tokens": 12,
        "messages": [
            {"role": "system", "content": f"{corpus.text()[:2000]} {code} {corpus.text()[:1500]}"},
            {"role": "user", "content": corpus.text()[4000:16000]},
            {"role": "assistant", "content": "The secret code of the vault is"},
        ],
        "add_generation_prompt": False,
        "continue_final_message": True,
    }

    def answer(**wish) -> str:
        with post(url, {**chat, "vllm_xargs": wish}) as response:
            return json.load(response)["choices"][0]["message"]["content"]

    assert "7261904" in answer(kv_eviction="none"), "the model must know, or this says nothing"
    assert "7261904" not in answer(kv_keep=0.03)
    assert "7261904" in answer(kv_keep=0.03, kv_protect=[0])
    assert "7261904" in answer(kv_keep=0.03, kv_protect=[-3, "900:1000"])


def test_its_pages_can_be_forgotten_from_outside(server):
    """The prefix cache is emptied, or the server sleeps for a while."""
    url, _ = server
    ask = {"model": SERVED_NAME, "prompt": corpus.text()[:3000], "max_tokens": 8, "temperature": 0}

    def answer() -> tuple[str, bool]:
        hits = "vllm:prefix_cache_hits_total"
        before = counters(url)[hits]
        with post(url, ask, "/v1/completions") as response:
            text = json.load(response)["choices"][0]["text"]
        return text, counters(url)[hits] > before

    def tell(path: str) -> dict:
        with post(url, {}, path) as response:
            return json.load(response)

    first, _ = answer()
    assert answer() == (first, True)
    assert tell("/reset_prefix_cache") == {"success": True}
    assert answer() == (first, False)
    assert tell("/sleep?level=1")["status"] == "sleeping"
    assert tell("/wake_up")["status"] == "awake"
    assert answer() == (first, False)
    assert answer() == (first, True)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--kv-eviction-config.keep", "2"], "keep is 2: input should be less than or equal to 1"),
        (
            ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 2}'],
            "EntropyKV does not support speculative decoding",
        ),
    ],
)
def test_a_wrong_start_ends_with_one_sentence(words, sentence):
    vllm = Path(sys.executable).with_name("vllm")
    command = [str(vllm), "serve", model_folder(), "--kv-eviction", "entropykv", *words]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert ended.returncode != 0
    last = ended.stderr.strip().splitlines()[-1]
    assert last.startswith("entropykv: error: ")
    assert sentence in last
    assert "Traceback" not in ended.stderr


def test_a_worker_without_the_plugin_stops_the_start(tmp_path):
    """A worker that is not ours reports full caches: the engine must refuse them."""
    script = tmp_path / "start.py"
    script.write_text(
        "from vllm import LLM\n"
        "from entropykv_vllm import engine_args\n"
        "if __name__ == '__main__':\n"
        "    args = engine_args('entropykv')\n"
        "    args.pop('worker_cls')\n"
        f"    LLM({model_folder()!r}, dtype='float32', max_model_len=512, enforce_eager=True,\n"
        "        kv_cache_memory_bytes=1 << 28, **args)\n"
    )
    ended = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=200
    )
    assert ended.returncode != 0
    assert "a worker does not run EntropyKV" in ended.stdout + ended.stderr


def test_a_context_fits_where_stock_vllm_refuses_to_start(tmp_path):
    """8,192 tokens in a pool of half as many full ones."""
    script = tmp_path / "start.py"
    script.write_text(
        "import sys\n"
        "from vllm import LLM, SamplingParams\n"
        "from entropykv_vllm import engine_args\n"
        "if __name__ == '__main__':\n"
        "    settings = {'bits': 16, 'keep': 0.25, 'window': 256, 'interval': 512}\n"
        "    args = engine_args('entropykv', **settings) if sys.argv[1] == 'evict' else {}\n"
        f"    llm = LLM({model_folder()!r}, dtype='float32', max_model_len=8192,\n"
        "              enforce_eager=True, kv_cache_memory_bytes=4096 * 46080, **args)\n"
        "    print('started')\n"
    )
    # This variable would override the size of the pool.
    env = {name: v for name, v in os.environ.items() if name != "VLLM_CPU_KVCACHE_SPACE"}
    run = {
        how: subprocess.run(
            [sys.executable, str(script), how], capture_output=True, text=True, timeout=200, env=env
        )
        for how in ("evict", "stock")
    }
    assert "started" in run["evict"].stdout
    assert run["stock"].returncode != 0
    assert "larger than the available KV cache memory" in run["stock"].stderr + run["stock"].stdout
