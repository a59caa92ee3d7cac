# SPDX-License-Identifier: Apache-2.0
"""A small fixed slice of the evaluation, on the embedded model: a policy that breaks is noticed."""

import pytest

from entropykv_vllm.evaluation import corpus, engines
from entropykv_vllm.evaluation.offline import answers, variants
from entropykv_vllm.evaluation.offline.cell import Cell
from entropykv_vllm.evaluation.offline.model import Model
from entropykv_vllm.evaluation.tasks import TASKS
from entropykv_vllm.kernels.scores.entropykv import score
from entropykv_vllm.model.fetch import NAME

PROMPTS = 10
TOKENS = 1024
#: Little of a short text would be old enough with the settings that serve.
SHORT = {"window": 64, "interval": 128}

CELLS = {
    "full cache": Cell("full cache", "none"),
    "all in 4 bits": Cell("all in 4 bits", "entropykv", {"keep": 1.0, "bits": 4, **SHORT}),
    "entropykv": Cell("entropykv", "entropykv", {"keep": 0.5, "bits": 16, **SHORT}),
    "entropykv in 4 bits": Cell("4", "entropykv", {"keep": 0.5, "bits": 4, **SHORT}),
    "norm": Cell("norm", "norm", {"keep": 0.5, "bits": 16, **SHORT}),
    "h2o": Cell("h2o", "h2o", {"keep": 0.5, "bits": 16, **SHORT}),
    "random": Cell("random", "random", {"keep": 0.5, "bits": 16, **SHORT}),
    # What is ranked upside down keeps what nobody needs.
    "broken": Cell("broken", "entropykv", {"keep": 0.5, "bits": 16, **SHORT}, "upside down"),
}

#: The least and the most right answers of 10. The run is the same each time on one machine; others
#: may round otherwise, so the limits are a few answers from what was seen.
LIMITS = {
    "full cache": (9, 10),
    "all in 4 bits": (8, 10),
    "entropykv": (6, 10),
    "entropykv in 4 bits": (6, 10),
    "norm": (5, 10),
    "h2o": (0, 6),
    "random": (0, 5),
}


@pytest.fixture(scope="module")
def right():
    """How many of the answers of each cell were right."""
    with pytest.MonkeyPatch.context() as patch:
        broken = {"upside down": lambda keys, values, *_: -score(keys, values)}
        patch.setattr(variants, "VARIANTS", {**variants.VARIANTS, **broken})
        net, task = Model(engines.model_folder(NAME)), TASKS["needle"]
        book = corpus.encode(net.tokenizer)
        cases = task.build(net.tokenizer, book, TOKENS, PROMPTS, 0, (0.0, 0.8))
        found = answers.answer(net, list(CELLS.values()), cases, task.answer_tokens)
    return {
        name: sum(task.grade(text, case) for text, case in zip(result.answers, cases, strict=True))
        for name, result in zip(CELLS, found, strict=True)
    }


def passes(right, name, limits):
    low, high = limits
    return low <= right[name] <= high


@pytest.mark.slow
@pytest.mark.parametrize("name", LIMITS)
def test_a_policy_answers_as_before(right, name):
    assert passes(right, name, LIMITS[name]), right


@pytest.mark.slow
def test_a_broken_policy_would_be_noticed(right):
    assert not passes(right, "broken", LIMITS["entropykv"]), right
