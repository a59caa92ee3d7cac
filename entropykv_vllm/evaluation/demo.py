# SPDX-License-Identifier: Apache-2.0
"""`entropykv demo`: a long chat prompt with a number in its middle, with eviction off and on.

It is sent twice to each server. The first time all of it is read, and with eviction pages are freed
on the way, as old tokens are compressed. The second time the prefix cache has the pages, with
eviction the compressed ones, so the answer comes at once.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import asdict, dataclass, replace
from typing import Any

from entropykv_vllm.config.policies import MODULES
from entropykv_vllm.config.settings import load
from entropykv_vllm.errors import UsageError
from entropykv_vllm.evaluation import corpus, engines, options, prompts, scoring, server, table
from entropykv_vllm.help_text import command_parser
from entropykv_vllm.json_file import add_json, show, takes_stdout
from entropykv_vllm.option_values import LENGTH, SEED, SHARE
from entropykv_vllm.top.look import base_url, look

# A small model finds the number more often if the question has a turn of its own and the answer
# is begun for it; it then repeats the words that stand before the number.
READ = "I have read the text. What would you like to know?"
QUESTION = "What is the secret number of the lighthouse?"
BEGUN = "The secret number of the lighthouse is"
ANSWER_TOKENS = 24

SECONDS = (
    "Seconds are of one request at a time, and the servers ran one after the other, so whatever "
    "else this machine does shows in them; what many requests gain is in docs/benchmarks.md."
)

USED = "vllm:kv_cache_usage_perc"
FREED = "vllm:entropykv_pages_freed_total"
FOUND = "vllm:prefix_cache_hits_total"


@dataclass(frozen=True)
class Answer:
    """What came back, and what `/metrics` said the request changed.

    Of a streamed answer alone there are `first_token`, the seconds until it came, and `used`, the
    share of the pool's pages that the request held while it answered.
    """

    text: str
    prompt_tokens: int
    seconds: float
    changes: dict[str, float]
    first_token: float | None = None
    used: float | None = None


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    p = command_parser("demo", __doc__)
    p.add_argument("--url", help="a running server (default: start one without eviction, one with)")
    options.add_model(p)
    p.add_argument("--policy", default="entropykv", choices=MODULES, help="beside vLLM alone")
    p.add_argument("--config", metavar="SETTINGS", help="preset, file or JSON of the settings")
    p.add_argument("--tokens", type=LENGTH, default=6000, help="of prose")
    p.add_argument("--depth", type=SHARE, default=0.5, help="where the number lies in it")
    p.add_argument("--seed", type=SEED, default=0, help="of number and prose (default: 0)")
    add_json(p)
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
    return tokenizer.decode(case.ids, skip_special_tokens=True).strip(), case.number


def ask(client: Any, url: str, text: str, stream: bool) -> Answer:
    """Send the text; greedy, so that both times ask for the same."""
    before, start = server.counters(url), time.monotonic()
    if stream:
        answer = _streamed(client, url, text, start)
    else:
        reply = client.chat.completions.create(**_request(client, text))
        answer = Answer(reply.choices[0].message.content, reply.usage.prompt_tokens, 0, {})
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


def _streamed(client: Any, url: str, text: str, start: float) -> Answer:
    said, first, read, used = "", None, 0, 0.0
    print(f"  {'answer':<21} {BEGUN}", end="", flush=True)
    for chunk in client.chat.completions.create(
        **_request(client, text), stream=True, stream_options={"include_usage": True}
    ):
        read = chunk.usage.prompt_tokens if chunk.usage else read
        piece = (chunk.choices[0].delta.content or "") if chunk.choices else ""
        if piece and first is None:
            first = time.monotonic() - start
        said += piece
        used = max(used, server.counters(url).get(USED, 0.0))
        print(piece, end="", flush=True)
    print()
    return Answer(said, read, 0, {}, first, used)


def tell(answer: Answer, number: str) -> None:
    """Print what an answer says and what it cost."""
    right = "right" if scoring.exact(answer.text, number) else f"wrong, it is {number}"
    line("that is", right)
    line("prompt", f"{answer.prompt_tokens:,} tokens")
    if answer.first_token is not None:
        line("time to first token", f"{answer.first_token:.1f} s")
    line("time in all", f"{answer.seconds:.1f} s")
    if answer.used is not None:
        line("of the pool held", f"{100 * answer.used:.1f} %")
    for name, label in ((FREED, "pages freed"), (FOUND, "tokens found in cache")):
        if name in answer.changes:
            line(label, f"{answer.changes[name]:,.0f}")


def line(label: str, value: str) -> None:
    """Print one line of the report."""
    print(f"  {label:<21} {value}")


def rows(number: str, runs: Sequence[tuple[Answer, Answer]]) -> list[list[str]]:
    """Return the rows of the table, a column a server: what it answered twice, and what it cost."""

    def right(answer: Answer) -> str:
        verdict = "right" if scoring.exact(answer.text, number) else "wrong"
        return f"{scoring.found(answer.text) or 'no number'}, {verdict}"

    return [
        [label, *map(cell, runs)]
        for label, cell in (
            ("first answer", lambda run: right(run[0])),
            ("MB held while it answered", lambda run: f"{held(run[0]) / 1e6:.1f}"),
            ("pages freed", lambda run: f"{run[0].changes.get(FREED, 0):,.0f}"),
            ("seconds to its first token", lambda run: f"{run[0].first_token or 0:.1f}"),
            ("second answer", lambda run: right(run[1])),
            ("tokens found in the cache", lambda run: f"{run[1].changes.get(FOUND, 0):,.0f}"),
            ("seconds for all of it", lambda run: f"{run[1].seconds:.1f}"),
        )
    ]


def held(answer: Answer) -> float:
    """Return the bytes of a server of ours that a request held while it answered."""
    return (answer.used or 0.0) * server.pool_bytes()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    args = parser().parse_args(argv)
    try:
        load(args.policy, args.config)
    except ValueError as error:
        raise UsageError(f"argument --config: {error}") from None
    engines.check_length(args.model, args.tokens, ANSWER_TOKENS, "the answer")
    with redirect_stdout(sys.stderr) if takes_stdout(args.json) else nullcontext():
        number, runs = demonstrate(args)
    show(compared(number, runs), {"number": number, "servers": told(runs)}, args.json)
    return 0


def demonstrate(args: argparse.Namespace) -> tuple[str, dict[str, tuple[Answer, Answer]]]:
    """Ask one server, or one without eviction and one with it: the number, and all answers."""
    url = args.url and base_url(args.url)
    if url:
        look(url)
    text, number = prompt(args.model, args.tokens, args.depth, args.seed)
    print(f"\n{args.tokens:,} tokens of prose, {number} at {100 * args.depth:.0f} % of them")
    if url:
        return number, {url: run(url, text, number)}
    policies = ("none", args.policy)
    return number, {policy: serve(args, policy, text, number) for policy in policies}


def compared(number: str, runs: Mapping[str, tuple[Answer, Answer]]) -> str:
    """Both servers side by side; of one that ran already no more is known than was printed."""
    if "none" not in runs:
        return ""
    header = [policy.replace("none", "eviction off (32 bits)") for policy in runs]
    text = table.render(["", *header], rows(number, list(runs.values())))
    half = held(runs["none"][0]) / 2e6
    return f"\n{text}\n\nA full cache of 16 bits would hold {half:.1f} MB.\n{SECONDS}"


def told(runs: Mapping[str, tuple[Answer, Answer]]) -> dict[str, list[dict[str, Any]]]:
    """The answers, for programs."""
    return {server: [asdict(answer) for answer in answers] for server, answers in runs.items()}


def serve(args: argparse.Namespace, policy: str, text: str, number: str) -> tuple[Answer, Answer]:
    """Run with a server of its own, which is gone afterwards."""
    settings = "" if policy == "none" else f", with the settings {args.config or 'by default'}"
    print(f"\nstarting a server, --kv-eviction {policy}{settings}: a minute or two ...", flush=True)
    model = engines.model_folder(args.model)
    with server.serving(model, arguments(policy, args.config)) as (url, _):
        return run(url, text, number)


def run(url: str, text: str, number: str) -> tuple[Answer, Answer]:
    """Ask twice: streamed on an empty cache, then in one piece on a full one."""
    from openai import OpenAI

    client = OpenAI(base_url=f"{url}/v1", api_key="none", timeout=1800)
    print("\nfirst time, streamed; a CPU reads for half a minute or more ...", flush=True)
    first = ask(client, url, text, stream=True)
    tell(first, number)
    print("\nsecond time, not streamed ...", flush=True)
    second = ask(client, url, text, stream=False)
    line("answer", BEGUN + second.text)
    tell(second, number)
    return first, second
