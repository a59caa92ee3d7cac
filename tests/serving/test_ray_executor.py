# SPDX-License-Identifier: Apache-2.0
"""Waiting for a worker on another node ends when it dies."""

import pytest

pytest.importorskip("ray")
from entropykv_vllm.serving import ray_executor
from entropykv_vllm.serving.checks import UnsupportedError
from entropykv_vllm.version import __version__


class Queue:
    """An answer that comes after some looks, if it comes."""

    def __init__(self, looks: float) -> None:
        self.looks = looks
        self.waited = []

    def dequeue(self, timeout: float) -> str:
        self.waited.append(timeout)
        if len(self.waited) <= self.looks:
            raise TimeoutError
        return "answer"


def executor(failed: bool = False):
    made = object.__new__(ray_executor.EvictionRayExecutor)
    made._finalizer, made.is_failed = None, failed
    made.shutdown = lambda: None
    return made


def test_an_answer_is_waited_for():
    queue = Queue(looks=3)
    assert executor()._answer(queue.dequeue) == "answer"
    assert len(queue.waited) == 4


def test_a_dead_worker_ends_the_wait():
    with pytest.raises(RuntimeError, match="died"):
        executor(failed=True)._answer(Queue(looks=float("inf")).dequeue)


def test_an_answer_that_is_there_counts_though_a_worker_died():
    assert executor(failed=True)._answer(Queue(looks=0).dequeue) == "answer"


def test_a_time_limit_is_kept():
    queue = Queue(looks=float("inf"))
    with pytest.raises(TimeoutError):
        executor()._answer(queue.dequeue, timeout=ray_executor._LOOK / 2)
    assert queue.waited == [pytest.approx(ray_executor._LOOK / 2, abs=0.1)]


def test_nodes_are_named_once_each():
    found = [
        ("10.0.0.1", __version__, ""),
        ("10.0.0.2", None, "ModuleNotFoundError: gone"),
        ("10.0.0.2", None, "ModuleNotFoundError: gone"),
        ("10.0.0.3", "0.0.1", ""),
    ]
    with pytest.raises(UnsupportedError) as stop:
        ray_executor.check_nodes(found)
    text = str(stop.value)
    assert "10.0.0.1" not in text
    assert text.count("10.0.0.2 has none (ModuleNotFoundError: gone)") == 1
    assert "10.0.0.3 has 0.0.1" in text
    ray_executor.check_nodes(found[:1])
