# SPDX-License-Identifier: Apache-2.0
"""Which queries add to the attention masses does not depend on how a prompt was cut."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from entropykv_vllm.attention import masses
from entropykv_vllm.kernels.scores import OBSERVED
from entropykv_vllm.plan.schedule import TierPlan

PLAN = TierPlan("all", 16, 16, 64, 128, 32, 0.5, 4)


def counted(policy, steps):
    """The queries that stand in the table after each step: positions, as a set."""
    held, at, found = set(), 0, {}
    for step in steps:
        lens = torch.tensor([at + step], dtype=torch.int32)
        seen = masses.observed(PLAN, policy, lens, torch.tensor([step], dtype=torch.int32))
        if seen.fresh[0]:
            held = set()
        held |= set(range(at + int(seen.first[0]), at + step))
        at += step
        found[at] = set(held)
    return found


@st.composite
def cuts(draw):
    """Steps that, as the scheduler's, do not cross a boundary."""
    steps, at = [], 0
    while at < 3 * PLAN.interval:
        room = PLAN.interval - at % PLAN.interval
        steps.append(draw(st.integers(1, room)))
        at += steps[-1]
    return steps


@pytest.mark.parametrize("policy", OBSERVED)
@given(steps=cuts())
def test_at_a_boundary_the_last_queries_have_been_counted(policy, steps):
    queries = OBSERVED[policy].queries
    found = counted(policy, steps)
    for at in range(PLAN.interval, 3 * PLAN.interval + 1, PLAN.interval):
        first = 0 if queries is None else at - queries
        assert found[at] == set(range(first, at))


def test_scores_of_pages_alone_observe_nothing():
    one = torch.tensor([5], dtype=torch.int32)
    assert masses.observed(PLAN, "entropykv", one, one) is None


def test_requests_of_a_batch_have_their_own_windows():
    lens = torch.tensor([128, 100, 129], dtype=torch.int32)
    steps = torch.tensor([128, 1, 1], dtype=torch.int32)
    seen = masses.observed(PLAN, "snapkv", lens, steps)
    assert seen.first.tolist() == [96, 0, 96]
    assert seen.fresh.tolist() == [1, 0, 0]
    assert seen.first.dtype == seen.fresh.dtype == torch.int32


def test_new_tokens_start_without_mass():
    mass = torch.ones(3, 2, 16)
    masses.forget(mass, torch.tensor([17, -1, 32]), 16)
    assert mass.sum() == 3 * 2 * 16 - 4
    assert mass[1, :, 1].sum() == mass[2, :, 0].sum() == 0
