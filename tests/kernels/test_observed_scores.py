# SPDX-License-Identifier: Apache-2.0
"""Scores that read attention masses: each against its formula."""

import pytest
import torch

from entropykv_vllm.config.policies import READ_ATTENTION
from entropykv_vllm.kernels.scores import OBSERVED


def masses(*shape):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(0))


def naive(name, mass):
    """Scores of lists ``[heads][tokens]``."""
    heads, tokens = len(mass), len(mass[0])
    if name == "tova":
        return [[sum(head[i] for head in mass) / heads for i in range(tokens)]] * heads
    if name == "snapkv":
        near = [[head[max(0, i - 2) : i + 3] for i in range(tokens)] for head in mass]
        return [[sum(part) / len(part) for part in head] for head in near]
    return mass


@pytest.mark.parametrize("name", OBSERVED)
@pytest.mark.parametrize("tokens", [1, 4, 33])
def test_equals_the_formula(name, tokens):
    mass = masses(2, 3, tokens)
    scores = OBSERVED[name].score(mass)
    expected = torch.tensor([naive(name, part) for part in mass.tolist()])
    torch.testing.assert_close(scores, expected)


@pytest.mark.parametrize("name", OBSERVED)
def test_bits_do_not_depend_on_the_batch(name):
    mass = masses(5, 3, 70)
    together = OBSERVED[name].score(mass)
    for one, alone in zip(mass, together, strict=True):
        assert torch.equal(OBSERVED[name].score(one), alone)


@pytest.mark.parametrize("name", OBSERVED)
def test_is_computed_in_float32(name):
    mass = masses(2, 3, 40).bfloat16()
    scores = OBSERVED[name].score(mass)
    assert scores.dtype == torch.float32
    assert torch.equal(scores, OBSERVED[name].score(mass.float()))


def test_the_planner_which_does_without_torch_knows_which_policies_these_are():
    assert set(READ_ATTENTION) == set(OBSERVED)
