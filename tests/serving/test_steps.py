# SPDX-License-Identifier: Apache-2.0
"""Which steps of a model runner carry out moves, and which are refused."""

from types import SimpleNamespace

import pytest
from vllm.v1.core.sched.output import SchedulerOutput

from entropykv_vllm.pages.moves import PageMove
from entropykv_vllm.serving.scheduler import MOVES
from entropykv_vllm.serving.worker import EvictionWorkerMixin


class Worker(EvictionWorkerMixin):
    """Notes what it is told to move."""

    def __init__(self, warming_up: bool) -> None:
        self.noted: list = []
        self._warming_up = warming_up
        self._checksums = None
        self._view = SimpleNamespace(note=self.noted.append)
        self.carried: list = []

    def _carry_out(self, moves, new) -> None:
        self.carried.append(moves)


def step(moves=None) -> SchedulerOutput:
    output = SchedulerOutput.make_empty()
    if moves is not None:
        setattr(output, MOVES, moves)
    return output


def ran(output, *args, **kwargs) -> str:
    return "ran"


@pytest.mark.parametrize(
    ("warming_up", "moves", "more", "carried"),
    [
        (False, ["move"], {}, [["move"]]),
        (False, [], {"intermediate_tensors": None}, [[]]),
        (False, None, {"dummy_run": True}, []),
        (True, None, {"dummy_run": True}, []),
        (True, None, {}, [[]]),
    ],
)
def test_a_step_is_run_after_its_moves(warming_up, moves, more, carried):
    worker = Worker(warming_up)
    assert worker._after_moves(ran, step(moves), **more) == "ran"
    assert worker.carried == carried
    assert len(worker.noted) == (not warming_up and not more.get("dummy_run"))


def test_a_step_of_a_scheduler_that_does_not_evict_is_refused():
    with pytest.raises(RuntimeError, match="evicts but the scheduler does not"):
        Worker(False)._after_moves(ran, step(), dummy_run=False)


def test_the_row_of_a_new_request_is_left_alone():
    """It comes as it is after the moves, and an old request of its name may be there still."""
    worker, rewritten = Worker(False), []
    worker._tables = SimpleNamespace(rewrite=lambda *row: rewritten.append(row))
    moves = [PageMove(i, 0, name, (0, 1), (5, 6), (5,), 0) for i, name in enumerate(("old", "new"))]
    worker._rewrite_rows(moves, {"new"})
    assert rewritten == [("old", 0, {0: 5, 1: 0})]
