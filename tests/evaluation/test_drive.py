# SPDX-License-Identifier: Apache-2.0
"""Driving an engine step by step, on one that answers by script."""

from types import SimpleNamespace

from entropykv_vllm.evaluation import drive

# What each step gives: (finished requests, unfinished ones with a token, running after it).
STEPS = [((), ("a-0",), 1), (("a-0",), ("a-1",), 1), (("a-1",), (), 0)]


class Engine:
    def __init__(self):
        self.steps = iter(STEPS)
        self.left = len(STEPS)
        self.running = 0

    def add_request(self, request_id, prompt, params):
        assert prompt == {"prompt_token_ids": [1, 2]}

    def has_unfinished_requests(self):
        return self.left > 0

    def step(self):
        self.left -= 1
        finished, going, self.running = next(self.steps)
        return [
            SimpleNamespace(request_id=name, finished=name in finished)
            for name in (*finished, *going)
        ]


class Llm:
    def __init__(self):
        self.llm_engine = Engine()

    def get_metrics(self):
        running = self.llm_engine.running
        return [
            SimpleNamespace(name="vllm:num_requests_running", value=running),
            SimpleNamespace(name="vllm:kv_cache_usage_perc", value=running / 4),
            SimpleNamespace(name="a histogram", sum=3),
        ]


def test_outputs_come_in_their_order_with_a_sample_a_step():
    counts = []
    outputs, samples = drive.run(Llm(), [[1, 2], [1, 2]], None, "a", counts.append)
    assert [out.request_id for out in outputs] == ["a-0", "a-1"]
    assert counts == [1, 2]
    assert [sample.running for sample in samples] == [1, 1, 0]
    assert [sample.waiting for sample in samples] == [1, 0, 0]
    assert [sample.answering for sample in samples] == [1, 2, 1]
    assert [sample.used for sample in samples] == [0.25, 0.25, 0]
