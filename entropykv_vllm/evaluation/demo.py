# SPDX-License-Identifier: Apache-2.0
"""A long chat prompt with a number in its middle, sent twice to a server with eviction.

The first time all of it is read, and pages are freed on the way. The second time the prefix
cache has the compressed pages, so the answer comes at once.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from entropykv_vllm.evaluation import corpus, engines, prompts, scoring, server
from entropykv_vllm.model.fetch import NAME

# A small model finds the number more often if the question has a turn of its own and the answer
# is begun for it; it then repeats the words that stand before the number.
READ = "I have read the text. What would you like to know?"
QUESTION = "What is the secret number of the lighthouse?"
BEGUN = "The secret number of the lighthouse is"
ANSWER_TOKENS = 24


@dataclass(frozen=True)
class Answer:
    """What came back, and what `/metrics` said the request changed."""

    text: str
    prompt_tokens: int
    seconds: float
    first_token: float | None  # seconds until it came; None if the answer was not streamed
    changes: dict[str, float]


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    p = argparse.ArgumentParser(prog="demo", description=(__doc__ or "").split("\n")[0])
    p.add_argument("--url", help="a running server (default: start one)")
    p.add_argument("--model", default=NAME, help="folder or name of the model to start")
    p.add_argument(
        "--policy", default="entropykv", help="none is stock vLLM (default: %(default)s)"
    )
    p.add_argument("--config", help="preset, file or JSON of the settings")
    p.add_argument("--tokens", type=int, default=6000, help="tokens of prose (default: 6000)")
    p.add_argument("--depth", type=float, default=0.5, help="where the number lies, of 0 to 1")
    p.add_argument("--seed", type=int, default=0, help="decides the number and the prose")
    return p


def arguments(policy: str, config: str | None) -> list[str]:
    """Return the arguments of `vllm serve` for a policy."""
    if policy == "none":
        return []
    settings = [] if config is None else ["--kv-eviction-config", config]
    return ["--kv-eviction", policy, "--kv-cache-dtype", "bfloat16", *settings]


def prompt(model: str, tokens: int, depth: float, seed: int) -> tuple[str, str]:
    """Return the text, and the number in it."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(engines.model_folder(model))
    book = corpus.encode(tokenizer)
    case = prompts.build(tokenizer, book, tokens, 1, seed, (depth, depth), question="")[0]
    return tokenizer.decode(case.ids).strip(), case.number


def ask(client: Any, url: str, text: str, stream: bool) -> Answer:
    """Send the text; greedy, so that both times ask for the same."""
    before, start = server.counters(url), time.monotonic()
    if stream:
        answer = _streamed(client, text, start)
    else:
        reply = client.chat.completions.create(**_request(client, text))
        answer = Answer(reply.choices[0].message.content, reply.usage.prompt_tokens, 0, None, {})
    seconds, after = time.monotonic() - start, server.counters(url)
    changes = {name: after[name] - before.get(name, 0) for name in after}
    return replace(answer, seconds=seconds, changes=changes)


def conversation(text: str) -> list[dict[str, str]]:
    """Return the chat whose last turn the model goes on with."""
    turns = (("user", text), ("assistant", READ), ("user", QUESTION), ("assistant", BEGUN))
    return [{"role": role, "content": content} for role, content in turns]


def _request(client: Any, text: str) -> dict[str, Any]:
    return {
        "model": client.models.list().data[0].id,
        "messages": conversation(text),
        "extra_body": {"add_generation_prompt": False, "continue_final_message": True},
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
    }


def _streamed(client: Any, text: str, start: float) -> Answer:
    said, first, read = "", None, 0
    print(f"  {'answer':<21} {BEGUN}", end="", flush=True)
    for chunk in client.chat.completions.create(
        **_request(client, text), stream=True, stream_options={"include_usage": True}
    ):
        read = chunk.usage.prompt_tokens if chunk.usage else read
        piece = (chunk.choices[0].delta.content or "") if chunk.choices else ""
        if piece and first is None:
            first = time.monotonic() - start
        said += piece
        print(piece, end="", flush=True)
    print()
    return Answer(said, read, 0, first, {})


def show(answer: Answer, number: str) -> None:
    """Print what an answer says and what it cost."""
    right = "right" if scoring.exact(answer.text, number) else f"wrong, it is {number}"
    line("that is", right)
    line("prompt", f"{answer.prompt_tokens:,} tokens")
    if answer.first_token is not None:
        line("time to first token", f"{answer.first_token:.1f} s")
    line("time in all", f"{answer.seconds:.1f} s")
    for name, label in (
        ("vllm:entropykv_pages_freed_total", "pages freed"),
        ("vllm:prefix_cache_hits_total", "tokens found in cache"),
    ):
        if name in answer.changes:
            line(label, f"{answer.changes[name]:,.0f}")


def line(label: str, value: str) -> None:
    """Print one line of the report."""
    print(f"  {label:<21} {value}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; return the exit status."""
    args = parser().parse_args(argv)
    text, number = prompt(args.model, args.tokens, args.depth, args.seed)
    print(f"\n{args.tokens:,} tokens of prose, {number} at {100 * args.depth:.0f} % of them")
    place: AbstractContextManager[tuple[str, Any]]
    if args.url:
        place = nullcontext((args.url.rstrip("/"), "its own"))
    else:
        print("starting a server, which takes a minute ...", flush=True)
        model = engines.model_folder(args.model)
        place = server.serving(model, arguments(args.policy, args.config))
    with place as (url, log):
        print(f"server {url}, log {log}")
        run(url, text, number)
    return 0


def run(url: str, text: str, number: str) -> None:
    """Ask twice: streamed on an empty cache, then in one piece on a full one."""
    from openai import OpenAI

    client = OpenAI(base_url=f"{url}/v1", api_key="none", timeout=1800)
    print("\nfirst time, streamed")
    show(ask(client, url, text, stream=True), number)
    print("\nsecond time, not streamed")
    second = ask(client, url, text, stream=False)
    line("answer", BEGUN + second.text)
    show(second, number)


if __name__ == "__main__":
    raise SystemExit(main())
