# SPDX-License-Identifier: Apache-2.0
"""Which fresh pages are cleared for layers whose kernels are not ours."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.kv_cache_interface import MambaSpec, SlidingWindowSpec

from entropykv_vllm.pages.moves import PageMove
from entropykv_vllm.pages.spec import Origin, TierSpec
from entropykv_vllm.plan.schedule import TierPlan
from entropykv_vllm.serving.clearing import ask_for, clear, cleared_groups, without_survivors
from entropykv_vllm.serving.worker import EvictionGPUWorker, EvictionWorkerMixin

COMMON = {"block_size": 32, "num_kv_heads": 1, "head_size": 64, "dtype": torch.float16}


def tier(bits: int) -> TierSpec:
    plan = TierPlan("t", 32, 32, 128, 96, 64, 0.5, 0, bits=bits)
    return TierSpec(plan=plan, origin=Origin("0", "", "here"), **COMMON)


WINDOW = SlidingWindowSpec(sliding_window=128, **COMMON)
STATE = MambaSpec(block_size=32, shapes=((1, 8),), dtypes=(torch.float16,))


def pool(*specs):
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=s) for s in specs])


@pytest.mark.parametrize(
    ("specs", "found"),
    [
        ([tier(4), WINDOW], [1]),
        ([WINDOW, tier(8), tier(16), STATE], [0, 2]),
        ([tier(16), WINDOW], []),
        ([tier(4), tier(8)], []),
        ([tier(4), STATE], []),
    ],
)
def test_pages_are_cleared_where_others_may_have_left_codes(specs, found):
    assert cleared_groups(pool(*specs)) == found
    managers = [SimpleNamespace(_record_new_block_ids=False) for _ in specs]
    scheduler = SimpleNamespace(kv_cache_config=pool(*specs), needs_kv_cache_zeroing=False)
    ask_for(scheduler, managers)
    assert [i for i, m in enumerate(managers) if m._record_new_block_ids] == found
    assert scheduler.needs_kv_cache_zeroing is bool(found)


def test_the_pages_of_some_layers_are_cleared():
    ours, theirs = torch.ones(4, 1, 2, 3), torch.ones(4, 1, 2, 3)
    clear([theirs], [1, 3])
    assert theirs.sum((1, 2, 3)).tolist() == [6, 0, 6, 0]
    assert ours.min() == 1


@pytest.mark.parametrize(
    ("specs", "vllm_sees_it", "prepared"),
    [([tier(4), WINDOW], False, 1), ([tier(4), WINDOW], True, 0), ([tier(16), WINDOW], False, 0)],
)
def test_the_gpu_worker_prepares_what_vllm_would_not(monkeypatch, specs, vllm_sees_it, prepared):
    monkeypatch.setattr(EvictionWorkerMixin, "initialize_from_config", lambda *args: None)
    worker, calls = EvictionGPUWorker.__new__(EvictionGPUWorker), []
    worker.model_runner = SimpleNamespace(_init_kv_zero_meta=lambda: calls.append(1))
    config = SimpleNamespace(**vars(pool(*specs)), needs_kv_cache_zeroing=vllm_sees_it)
    worker.initialize_from_config(config)
    assert len(calls) == prepared


PAGES = st.lists(st.integers(1, 6), max_size=3, unique=True)


@given(st.lists(st.tuples(PAGES, PAGES), max_size=6), st.lists(st.integers(1, 6), unique=True))
def test_what_the_last_move_of_a_page_left_there_stays(steps, fresh):
    moves = [
        PageMove(i, 0, "r", tuple(range(len(src))), tuple(src), tuple(dst[: len(src)]), 0)
        for i, (src, dst) in enumerate(steps)
    ]
    holds = dict.fromkeys(range(1, 7), False)
    for move in moves:
        holds |= dict.fromkeys(move.src, False) | dict.fromkeys(move.dst, True)
    assert without_survivors(fresh, moves) == [page for page in fresh if not holds[page]]


def test_nothing_to_clear_stays_nothing():
    assert without_survivors(None, []) is None
