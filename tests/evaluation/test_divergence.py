# SPDX-License-Identifier: Apache-2.0
"""Divergences of distributions known by hand, and the texts they are measured on."""

import math

import pytest
import torch

from entropykv_vllm.evaluation import divergence, passages
from tests.evaluation.letters import Letters


def logs(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows).log()


def test_divergence_of_known_distributions():
    full, other = logs([0.5, 0.5], [0.9, 0.1]), logs([0.25, 0.75], [0.9, 0.1])
    by_hand = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert divergence.kl(full, other).tolist() == pytest.approx([by_hand, 0])


def test_the_likeliest_token_may_differ():
    full, other = logs([0.6, 0.4], [0.6, 0.4]), logs([0.4, 0.6], [0.9, 0.1])
    assert divergence.compare(full, other)["top1"] == [0.0, 1.0]


def test_the_mean_is_over_texts_and_lies_in_its_interval():
    texts = [{"kl": [0.0, 0.2], "top1": [1.0, 1.0]}, {"kl": [0.3, 0.3], "top1": [0.0, 1.0]}]
    found = divergence.summary(texts)
    mean, low, high = found["kl"]
    assert mean == pytest.approx(0.2)
    assert 0.1 <= low <= mean <= high <= 0.3
    assert found["top1"][0] == 0.75


def test_small_divergences_keep_their_digits():
    assert divergence.nats([0.00123, 0.001, 0.25]) == "0.0012 (0.001-0.250)"


def test_passages_start_as_the_models_prompts_do():
    assert passages.opening(Letters()) == [0]
    first = passages.opening(Letters())
    assert passages.cut([[1, 2, 3], [4, 5]], 2, 4, first) == [[0, 1, 2, 3], [0, 4, 5, 1]]


def test_passages_have_their_length_and_go_round():
    sentences = [[1, 2], [3, 4, 5], [6]]
    assert passages.cut(sentences, 3, 5, []) == [[1, 2, 3, 4, 5], [3, 4, 5, 6, 1], [6, 1, 2, 3, 4]]
    assert passages.cut(sentences, 1, 8, []) == [[1, 2, 3, 4, 5, 6, 1, 2]]
