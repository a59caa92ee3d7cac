# SPDX-License-Identifier: Apache-2.0
"""Prompts have the asked length, and the needle lies where it should."""

import pytest

from entropykv_vllm.evaluation import corpus, prompts
from tests.evaluation.letters import Letters


class Words:
    """A tokenizer with a token a word; ids count up as words are met."""

    def __init__(self):
        self.ids: dict[str, int] = {}

    bos_token_id = None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [self.ids.setdefault(word, len(self.ids)) for word in text.split()]


@pytest.fixture(scope="module")
def tokenizer():
    return Words()


@pytest.fixture(scope="module")
def book(tokenizer):
    return corpus.encode(tokenizer)


def test_sentences_join_to_the_prose():
    assert "".join(corpus.sentences(corpus.text())) == corpus.text()


def test_the_text_is_long_and_small():
    assert len(corpus.text().split()) > 45_000
    assert len(corpus.text().encode()) < 400_000


@pytest.mark.parametrize("tokens", [100, 2048, 6000])
def test_prompts_have_the_exact_length(tokenizer, book, tokens):
    cases = prompts.build(tokenizer, book, tokens, 12)
    assert [len(case.ids) for case in cases] == [tokens] * 12


def test_the_needle_lies_at_its_depth(tokenizer, book):
    longest = max(map(len, book))
    for case in prompts.build(tokenizer, book, 2048, 16):
        needle = tokenizer.encode(
            prompts.NEEDLE.format(number=case.number), add_special_tokens=False
        )
        assert case.ids[case.position : case.position + len(needle)] == needle
        assert abs(case.position - case.depth * 2048) <= longest


def test_the_question_ends_the_prompt(tokenizer, book):
    question = tokenizer.encode(prompts.QUESTION, add_special_tokens=False)
    for case in prompts.build(tokenizer, book, 500, 4):
        assert case.ids[-len(question) :] == question


def test_depths_are_spread_over_the_range_asked_for():
    assert prompts.spread(4) == [0.125, 0.375, 0.625, 0.875]
    assert prompts.spread(2, 0.2, 0.6) == pytest.approx([0.3, 0.5])


def test_numbers_have_seven_digits_and_the_seed_decides(tokenizer, book):
    cases = prompts.build(tokenizer, book, 300, 20, seed=1)
    assert all(len(case.number) == 7 for case in cases)
    assert cases == prompts.build(tokenizer, book, 300, 20, seed=1)
    assert cases != prompts.build(tokenizer, book, 300, 20, seed=2)


def test_no_two_prompts_share_a_prefix(tokenizer, book):
    starts = {tuple(case.ids[:16]) for case in prompts.build(tokenizer, book, 2048, 48)}
    assert len(starts) == 48


def test_a_haystack_goes_round_at_the_end_of_the_text():
    sentences = [[0, 1, 2], [3], [4, 5]]
    assert prompts.haystack(sentences, 2, 4) == [[5], [0, 1, 2]]
    assert prompts.haystack(sentences, 1, 5) == [[4, 5], [0, 1, 2]]


def test_a_haystack_is_cut_from_the_front_across_short_sentences():
    assert prompts.haystack([[0], [1], [2, 3, 4, 5]], 0, 3) == [[3, 4, 5]]


def test_prompts_start_as_the_model_wants_it():
    tokenizer = Letters()
    short = [tokenizer.encode(part, False) for part in corpus.sentences(corpus.text()[:20_000])]
    needle = prompts.NEEDLE[:10]
    for case in prompts.build(tokenizer, short, 2000, 4):
        assert len(case.ids) == 2000
        assert case.ids[0] == tokenizer.bos_token_id
        assert 0 not in case.ids[1:]
        assert tokenizer.decode(case.ids[case.position :]).startswith(needle)
