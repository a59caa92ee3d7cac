# SPDX-License-Identifier: Apache-2.0
"""One run of `entropykv bench`: a server, the load, and what both say of it."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
import time
from typing import Any

from entropykv_vllm.evaluation import cells, corpus, engines, prompts, server
from entropykv_vllm.evaluation.bench.load import Answer, arrivals, drive
from entropykv_vllm.evaluation.bench.summary import Look, summary

LOOK = 0.25  # seconds between looks at the server
WARM_UP = 2  # short requests before the clock runs


class Watch(threading.Thread):
    """Looks at a server's gauges until it is told to stop."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.url, self.start_time, self.looks = url, time.monotonic(), list[Look]()
        self._end = threading.Event()

    def run(self) -> None:
        """Look every `LOOK` seconds."""
        while not self._end.wait(LOOK):
            now = server.counters(self.url)
            self.looks.append(
                Look(
                    time.monotonic() - self.start_time,
                    int(now["vllm:num_requests_running"]),
                    int(now["vllm:num_requests_waiting"]),
                    now["vllm:kv_cache_usage_perc"],
                )
            )

    def stop(self) -> list[Look]:
        """End it; what it saw."""
        self._end.set()
        self.join()
        return self.looks


def arguments(spec: dict[str, Any]) -> list[str]:
    """The arguments of `vllm serve` for a run, but for the model and the address."""
    eviction = spec["eviction"]
    return [
        *("--kv-cache-memory-bytes", str(spec["pool_bytes"])),
        *("--max-num-seqs", str(spec["requests"])),
        *("--max-model-len", str(spec["tokens"] + spec["output"])),
        *("--dtype", spec["dtype"]),
        *(["--kv-eviction", spec["policy"]] if spec["policy"] != "none" else []),
        *(["--kv-eviction-config", json.dumps(eviction)] if eviction else []),
        *spec["serve"],
    ]


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    """Serve, drive, count."""
    from transformers import AutoTokenizer

    folder = engines.model_folder(spec["model"])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    cases = prompts.build(tokenizer, corpus.encode(tokenizer), spec["tokens"], spec["requests"])
    times = arrivals(spec["requests"], spec["rate"])
    with server.serving(folder, arguments(spec)) as (url, _):
        asyncio.run(drive(url, [cases[0].ids[-256:]] * WARM_UP, [0.0] * WARM_UP, 8))
        before = server.counters(url)
        watch = Watch(url)
        watch.start()
        answers = asyncio.run(
            drive(
                url,
                [case.ids for case in cases],
                times,
                spec["output"],
                lambda count: cells.report(count, spec["requests"]),
            )
        )
        looks = watch.stop()
        after = server.counters(url)
    return {
        **summary(answers, [case.number for case in cases], looks),
        "preemptions": after["vllm:num_preemptions_total"] - before["vllm:num_preemptions_total"],
        "answers": [_brief(answer) for answer in answers],
        "looks": [dataclasses.astuple(look) for look in looks],
    }


def _brief(answer: Answer) -> dict[str, Any]:
    times = {"first": answer.first, "last": answer.last} if answer.tokens else {}
    return {"sent": answer.sent, **times, "tokens": answer.count, "text": answer.text[:40]}


if __name__ == "__main__":
    cells.main(measure)
