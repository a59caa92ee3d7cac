# SPDX-License-Identifier: Apache-2.0
"""The plugin in vLLM's engine, on a real model."""

import json
import re

import pytest
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams

from entropykv_vllm.evaluation import prompts as needles
from entropykv_vllm.plan.schedule import boundary, held_pages, peak_pages

from .conftest import MAX_TOKENS

pytestmark = pytest.mark.engine


def chunk_size(engine, tokens: int) -> None:
    engine.scheduler.max_num_scheduled_tokens = tokens


@pytest.fixture(autouse=True)
def clean(engine):
    chunk_size(engine, 8192)
    engine.held.clear()
    engine.evicted = 0
    engine.forget()
    before = engine.free_pages
    yield
    assert engine.free_pages == before, "pages leaked"
    engine.forget()


def test_prompts_within_the_window_answer_as_without_the_plugin(engine, corpus, stock):
    short = [corpus[i * 500 : i * 500 + 20 + 20 * i] for i in range(8)]
    long = [corpus[i * 900 : i * 900 + 1100 + 700 * i] for i in range(2)]
    answers = stock([*short, *long])
    assert engine.tokens(short) == answers[:8]
    assert engine.tokens(long, extra_args={"kv_eviction": "none"}) == answers[8:]
    assert engine.evicted == 0


def test_requests_that_ask_for_different_things_share_a_batch(engine, corpus):
    """Off, loose, hard, protected: each answers as alone, whoever else is there."""
    prompt, few = corpus[:1000], {"max_tokens": 12}
    wishes = [
        {},
        {"kv_eviction": "none"},
        {"kv_keep": 1.0},
        {"kv_keep": 0.05},
        {"kv_keep": 0.05, "kv_protect": ["300:500"]},
    ]
    alone = []
    for wish in wishes:
        engine.forget()
        alone.append(engine.tokens([prompt], extra_args=wish, **few)[0])
    assert len({tuple(answer) for answer in alone}) >= 2, "they must differ to say anything"
    engine.forget()
    for i, wish in enumerate(wishes):
        engine.add(f"p{i}", prompt, extra_args=wish, **few)
    together = {name: list(o.outputs[0].token_ids) for name, o in engine.run({}).items()}
    assert [together[f"p{i}"] for i in range(len(wishes))] == alone
    again = [engine.tokens([prompt], extra_args=wish, **few)[0] for wish in wishes]
    assert again == alone, "a prefix hit must bring the pages that were made for such a request"


def test_what_is_protected_is_not_evicted(engine, corpus):
    """Protecting all is as evicting nothing, where nothing is quantized."""
    prompt = corpus[700:2100]
    engine.tokens([prompt], extra_args={"kv_keep": 0.05, "kv_protect": ":"}, max_tokens=1)
    assert engine.evicted == 0
    if engine.tiers[0].plan.bits == 16:
        whole = engine.tokens([prompt], extra_args={"kv_eviction": "none"}, max_tokens=16)
        kept = engine.tokens([prompt], extra_args={"kv_protect": ":"}, max_tokens=16)
        assert kept == whole


@pytest.mark.parametrize("extra", [{"kv_keep": 2}, {"kv_eviction": "h2o"}, {"kv_protect": [0]}])
def test_a_wrong_wish_is_refused_before_the_engine(engine, corpus, extra):
    with pytest.raises(VLLMValidationError, match=next(iter(extra))):
        engine.add("wrong", corpus[:50], extra_args=extra)
    assert not engine.llm.llm_engine.has_unfinished_requests()


def test_what_never_fits_is_refused(engine, corpus, monkeypatch):
    cache = engine.llm.llm_engine.vllm_config.cache_config
    need = len(engine.tiers) * -(-1001 // 32)
    monkeypatch.setattr(cache, "num_gpu_blocks", need)  # one of them is the null page
    with pytest.raises(VLLMValidationError, match=f"would take {need} pages"):
        engine.add("long", corpus[:1000], extra_args={"kv_eviction": "none"})
    engine.tokens([corpus[:1000]], max_tokens=1)
    monkeypatch.setattr(cache, "num_gpu_blocks", need + 1)
    engine.tokens([corpus[:1000]], max_tokens=1, extra_args={"kv_eviction": "none"})


def test_the_peak_is_not_passed_and_the_answer_is_the_same_for_any_chunk_size(engine, corpus):
    length, answers = 4096, []
    prompt = corpus[: length - MAX_TOKENS]
    for chunk in (300, 8192):
        chunk_size(engine, chunk)
        engine.forget()
        engine.held.clear()
        answers.append(engine.tokens([prompt]))
        planned = [peak_pages(tier.plan, length) for tier in engine.tiers]
        highest = [0] * len(planned)
        for index, pages in engine.held["p0"]:
            highest[index] = max(highest[index], pages)
        assert all(h <= p for h, p in zip(highest, planned, strict=True)), (highest, planned)
        assert sum(highest) > 0.9 * sum(planned), "the plan is far from what happens"
        assert sum(highest) < 0.45 * len(planned) * length / 32
    assert answers[0] == answers[1]


def test_answers_do_not_depend_on_the_batch(engine, corpus):
    batch = [corpus[i * 1500 : i * 1500 + 900 + 130 * i] for i in range(4)]
    together = engine.tokens(batch)
    engine.forget()
    alone = [engine.tokens([prompt])[0] for prompt in batch]
    assert together == alone


def test_the_same_prompt_again_hits_the_prefix_cache_and_answers_the_same(engine, corpus):
    prompt = corpus[2000:4900]
    first = engine.run({"first": prompt})["first"]
    again = engine.run({"again": prompt})["again"]
    assert first.num_cached_tokens == 0
    assert again.num_cached_tokens == len(prompt) // 32 * 32
    assert again.outputs[0].token_ids == first.outputs[0].token_ids


def test_a_conversation_goes_on_from_its_compressed_pages(engine, corpus):
    prompt = corpus[3000:5000]
    first = engine.run({"turn": prompt})["turn"]
    longer = [*prompt, *first.outputs[0].token_ids, *corpus[100:140]]
    second = engine.run({"next": longer})["next"]
    known = len(prompt) + MAX_TOKENS - 1  # the last token was never an input
    assert second.num_cached_tokens == known // 32 * 32
    engine.forget()
    assert engine.tokens([longer])[0] == list(second.outputs[0].token_ids)


def test_a_needle_is_found_after_most_of_the_context_was_evicted(engine):
    from entropykv_vllm.evaluation import corpus as texts

    tokenizer = engine.llm.get_tokenizer()
    cases = needles.build(tokenizer, texts.encode(tokenizer), 2048, 4, seed=7)
    answers = engine.tokens([case.ids for case in cases], max_tokens=10)
    found = [case.number in tokenizer.decode(ids) for case, ids in zip(cases, answers, strict=True)]
    assert sum(found) >= 2, [tokenizer.decode(ids) for ids in answers]
    assert engine.evicted > 0


def test_requests_aborted_at_any_point_give_their_pages_back(engine, corpus):
    chunk_size(engine, 700)
    for steps in (1, 3, 6, 9):
        engine.add("gone", corpus[:3000])
        engine.add("also", corpus[500:2500])
        for _ in range(steps):
            engine.step()
        engine.llm.llm_engine.abort_request(["gone", "also"])
        while engine.llm.llm_engine.has_unfinished_requests():
            engine.step()


def test_several_answers_to_one_prompt(engine, corpus):
    output = engine.run({"n": corpus[:1500]}, n=3, temperature=0.8, max_tokens=24)["n"]
    assert len({tuple(o.token_ids) for o in output.outputs}) > 1


def test_a_seed_gives_the_same_answer_whatever_the_chunks(engine, corpus):
    sampling = {"temperature": 1.0, "seed": 5, "max_tokens": 16}
    answers = []
    for chunk in (100, 8192):
        chunk_size(engine, chunk)
        engine.forget()
        answers.append(engine.tokens([corpus[:1100]], **sampling))
    assert answers[0] == answers[1]
    assert engine.tokens([corpus[:1100]], **sampling | {"seed": 6}) != answers[0]


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 10, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def test_answers_keep_the_form_that_was_asked_for(engine, corpus):
    """Across a boundary, at which tokens go; and beside a request that asks for none."""
    interval = engine.tiers[0].plan.interval
    prompt = corpus[: -(-700 // interval) * interval - 6]
    few = {"max_tokens": 40, "ignore_eos": False}
    free = engine.tokens([prompt], **few)[0]
    for name, form in {
        "free": None,
        "json": StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True),
        "choice": StructuredOutputsParams(choice=["the first of the two", "the second one"]),
        "regex": StructuredOutputsParams(regex=r"\d{3}-\d{4} is [a-z]{5}\."),
    }.items():
        engine.add(name, prompt, structured_outputs=form, **few)
    done = engine.run({})
    assert engine.evicted > 0
    text = {name: output.outputs[0].text for name, output in done.items()}
    made = json.loads(text["json"])
    assert list(made) == ["name", "age"]
    assert 10 <= made["age"] <= 99
    assert text["choice"] in ("the first of the two", "the second one")
    assert re.fullmatch(r"\d{3}-\d{4} is [a-z]{5}\.", text["regex"])
    assert list(done["free"].outputs[0].token_ids) == free


def test_preempted_requests_answer_as_if_they_were_not(engine, corpus):
    """A pool that all fit into with their prompts, but not with their answers."""
    batch = {f"r{i}": corpus[i * 1100 : i * 1100 + 900] for i in range(3)}
    calm = engine.run(batch, max_tokens=160)
    engine.forget()
    before = engine.preemptions
    pool = engine.scheduler.kv_cache_manager.block_pool
    room = sum(
        2 * held_pages(tier.plan, boundary(tier.plan, 899), 900) + peak_pages(tier.plan, 900) + 1
        for tier in engine.tiers
    )
    kept_back = pool.get_new_blocks(pool.get_num_free_blocks() - room)
    engine.scheduler._audits = False  # these pages are nobody's
    try:
        tight = engine.run(batch, max_tokens=160)
    finally:
        pool.free_blocks(kept_back)
    assert engine.preemptions > before
    for name in batch:
        assert tight[name].outputs[0].token_ids == calm[name].outputs[0].token_ids


def test_metrics_tell_what_was_freed(engine, corpus):
    from entropykv_vllm.serving import metrics

    metrics.attach(engine.llm)
    engine.run({"m": corpus[:1500]})
    values = {m.name: m for m in engine.llm.get_metrics() if "entropykv" in m.name}
    assert values["vllm:entropykv_pages_freed"].value > 0
    assert values["vllm:entropykv_tokens_evicted"].value > 0
