# SPDX-License-Identifier: Apache-2.0
"""Tasks make prompts of the asked length that hold what they ask for."""

import random

import pytest

from entropykv_vllm.evaluation import corpus
from entropykv_vllm.evaluation.tasks import TASKS
from entropykv_vllm.evaluation.tasks.case import Case
from entropykv_vllm.evaluation.tasks.copying import passage
from entropykv_vllm.evaluation.tasks.grades import (
    common,
    first_word,
    share_of_numbers,
    words_in_order,
)
from entropykv_vllm.evaluation.tasks.prose import Place, hide
from tests.evaluation.letters import Letters

ALL_OVER = (0.0, 1.0)


@pytest.fixture(scope="module")
def tokenizer():
    return Letters()


@pytest.fixture(scope="module")
def book(tokenizer):
    prose = corpus.text()[:60_000]
    return [tokenizer.encode(s, add_special_tokens=False) for s in corpus.sentences(prose)]


def build(tokenizer, book, name, tokens=4096, count=6, seed=0, depths=ALL_OVER, aware=False):
    return TASKS[name].build(tokenizer, book, tokens, count, seed, depths, aware)


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("aware", [False, True])
def test_prompts_have_the_asked_length(tokenizer, book, name, aware):
    for case in build(tokenizer, book, name, 4096, aware=aware):
        assert len(case.context) + len(case.question) * aware == 4096
        assert case.question
        assert case.primer


@pytest.mark.parametrize("name", TASKS)
def test_the_answers_are_in_the_context_and_nowhere_else(tokenizer, book, name):
    for case in build(tokenizer, book, name):
        for answer in case.answers:
            assert answer in tokenizer.decode(case.context)
            assert answer not in tokenizer.decode(case.question + case.primer)


@pytest.mark.parametrize("name", TASKS)
def test_the_first_fact_lies_at_its_depth(tokenizer, book, name):
    for case in build(tokenizer, book, name, depths=(0.2, 0.8)):
        assert 0.0 <= case.depth <= 0.8
        first = min(tokenizer.decode(case.context).index(answer) for answer in case.answers)
        if name != "multikey":  # the depth of a case is that of the first of all its keys
            assert first / 4096 == pytest.approx(case.depth, abs=0.15)


@pytest.mark.parametrize("name", TASKS)
def test_an_answer_out_of_the_context_is_right_and_another_one_is_not(tokenizer, book, name):
    case, *others = build(tokenizer, book, name)
    grade = TASKS[name].grade
    assert grade(" " + ", ".join(case.answers) + ".", case) == 1
    for other in others:
        assert grade(" " + ", ".join(other.answers) + ".", case) < 0.7
    assert grade("", case) == 0


@pytest.mark.parametrize("name", TASKS)
def test_the_seed_decides(tokenizer, book, name):
    assert build(tokenizer, book, name) == build(tokenizer, book, name)
    assert build(tokenizer, book, name) != build(tokenizer, book, name, seed=1)


@pytest.mark.parametrize("name", TASKS)
def test_prompts_start_as_the_model_wants_it(tokenizer, book, name):
    for case in build(tokenizer, book, name):
        assert case.context[0] == tokenizer.bos_token_id
        assert tokenizer.bos_token_id not in case.context[1:] + case.question + case.primer


@pytest.mark.parametrize("name", TASKS)
def test_too_few_tokens_are_refused(tokenizer, book, name):
    with pytest.raises(ValueError, match="tokens"):
        build(tokenizer, book, name, tokens=40)


def test_facts_of_one_place_keep_their_order(tokenizer):
    prose = [[ord("a")] * 10, [ord("b")] * 10]
    facts = [(0.5, [ord("1")]), (0.0, [ord("0")]), (0.52, [ord("2")]), (1.0, [ord("3")])]
    found = tokenizer.decode(hide(Place(tokenizer, prose, 0, 25, False), [], facts))
    assert found == "0" + "a" * 10 + "12" + "b" * 10 + "3"


def test_a_passage_has_about_twenty_words_and_differs_each_time():
    rng = random.Random(0)
    passages = [passage(rng) for _ in range(50)]
    assert len(set(passages)) == 50
    assert all(18 <= len(text.split()) <= 22 for text in passages)


def case(*answers: str) -> Case:
    return Case([], [], [], answers, 0.0)


def test_grades():
    assert first_word(' "Lemon", it said', case("lemon")) == 1
    assert first_word(" a lemon", case("lemon")) == 0
    assert share_of_numbers(" 12345, then 99999 and 67,890.", case("67890", "12345", "5")) == 2 / 3
    assert share_of_numbers(" 1, 2, 3, 67890", case("67890", "12345")) == 0
    assert words_in_order(" The old cook, the pan", case("the old cook kept the pan")) == 5 / 6
    assert words_in_order(" pan the kept cook old the", case("the old cook kept the pan")) == 3 / 6


def test_the_longest_common_subsequence():
    assert common(list("abcbdab"), list("bdcaba")) == 4
    assert common([], ["a"]) == common(["a"], []) == 0
