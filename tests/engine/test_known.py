# SPDX-License-Identifier: Apache-2.0
"""Known ways in which such systems break, through an engine; docs/testing.md lists all of them."""

import gc
import random

import pytest
from vllm import SamplingParams
from vllm.v1.engine.input_processor import InputProcessor

from entropykv_vllm.plan.schedule import TierPlan, boundary, held_pages, next_boundary

from . import lora
from .run_runner import make_model
from .watched import SETTINGS, Watched, make_llm

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_model(folder)
    return folder


@pytest.fixture(scope="module")
def make(folder):
    """Makes engines, which end together: one that ends takes vLLM's process groups with it."""
    made = []

    def make(settings: dict | None, **options):
        made.append(make_llm(folder, settings, **options))
        return made[-1]

    yield make
    made.clear()
    gc.collect()


@pytest.fixture(scope="module")
def stock(make):
    """An engine without eviction, made before those with it, in the same process."""
    return make(None)


@pytest.fixture(scope="module", params=SETTINGS)
def served(request, stock, make):
    cache = "bfloat16" if request.param == "4 bits" else "auto"
    return Watched(make(SETTINGS[request.param], kv_cache_dtype=cache))


@pytest.fixture
def engine(served):
    """The engine as it was after its start."""
    served.in_chunks(8192)
    served.poisonous = False
    served.moved = served.reused = served.in_place = 0
    served.held.clear()
    served.forget()
    before = served.free_pages
    yield served
    assert served.free_pages == before, "pages leaked"
    served.forget()


#: Of settings whose numbers can be compared with vLLM's: its kernels for CPUs read a cache of the
#: model's dtype only.
as_exact_as_vllm = pytest.mark.parametrize("served", ["16 bits"], indirect=True)


def text(length: int, seed: int = 1) -> list[int]:
    """A prompt of random tokens; those of one seed begin alike."""
    rng = random.Random(seed)
    return [rng.randrange(3, 125) for _ in range(length)]


def texts(*lengths: int) -> list[list[int]]:
    """Prompts that share no prefix."""
    return [text(length, seed) for seed, length in enumerate(lengths)]


def plainly(stock, prompts: list[list[int]], **params) -> list:
    """What vLLM's own engine says."""
    options = {"temperature": 0, "max_tokens": 8, "ignore_eos": True, "detokenize": False}
    inputs = [{"prompt_token_ids": ids} for ids in prompts]
    return stock.generate(inputs, SamplingParams(**{**options, **params}), use_tqdm=False)


def answers(outputs) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def alone(engine, prompts: list[list[int]], **params) -> list[list[int]]:
    """Answers of an engine that knows nothing else, each."""
    found = []
    for prompt in prompts:
        engine.forget()
        found += engine.tokens([prompt], **params)
    engine.forget()
    return found


def collapse(plan: TierPlan, segments: int) -> int:
    """The boundary at which so many segments are collapsed."""
    return next_boundary(plan.interval, plan.window + segments * plan.segment - 1)


def first_move(engine) -> int:
    """The first position at which a page is moved."""
    return min(collapse(tier.plan, 1) for tier in engine.tiers)


def edges(engine) -> list[int]:
    """Lengths at which something begins or ends, and one token less and more."""
    found = {2}
    for plan in (tier.plan for tier in engine.tiers):
        found |= {collapse(plan, segments) for segments in (1, 2, 3)}
        found |= {plan.page, plan.window, plan.segment, plan.interval, 2 * plan.interval}
        found.add(plan.window + plan.segment)
    return sorted({edge + more for edge in found for more in (-1, 0, 1)})


# -- pages ---------------------------------------------------------------------------------------


def test_no_row_of_a_worker_is_stale_after_a_page_went(engine):
    """Rows are compared at each step, while requests are read, answered, and end at any time."""
    engine.in_chunks(150)
    for number, prompt in enumerate(texts(500, 40, 300, 130)):
        engine.add(f"r{number}", prompt, max_tokens=20 + 70 * number)
    engine.run({})
    assert engine.moved > 3


def test_a_page_that_is_freed_and_given_out_in_one_step_holds_what_it_should(engine):
    prompts, longer = texts(600, 500, 400), {"max_tokens": 60}
    calm = alone(engine, prompts, **longer)
    with engine.tight(660, 660):
        assert engine.tokens(prompts, **longer) == calm
    assert engine.reused > 0


def test_what_nobody_wrote_is_read_by_nobody(engine):
    """The null page too, and NaN times 0 is NaN."""
    prompts = texts(500, 20, 290, 130)
    calm = engine.tokens(prompts)
    engine.forget()
    engine.poisonous = True
    with engine.tight(520, 520):
        assert engine.tokens(prompts) == calm
    assert engine.moved > 0


def test_a_page_that_others_wrote_over_is_not_hit(engine):
    """The pool loses more and more of a prompt, which may be found again as far as it is whole."""
    prompt, hits = text(700), set()
    calm = engine.tokens([prompt])
    for others in range(6):
        engine.forget()
        with engine.tight(708):
            engine.tokens([prompt])
            engine.tokens([text(120, seed) for seed in range(10, 10 + others)])
            again = engine.run({"again": prompt})["again"]
        assert answers([again]) == calm
        hits.add(again.num_cached_tokens)
    assert min(hits) < max(hits) == len(prompt) // 32 * 32


def test_a_page_that_its_survivors_wrote_over_is_not_hit(engine):
    """Where no page is free to copy them to; a shorter prompt looks for what was there before."""
    at = first_move(engine)
    prompt, head = text(at + 40), text(100)
    calm = alone(engine, [head, prompt])
    engine.add("p", prompt)
    while engine.scheduler.running == [] or engine.scheduler.running[0].num_computed_tokens < at:
        engine.step()
    with engine.tight():
        engine.step()
    assert engine.in_place > 0
    assert answers(engine.run({}).values()) == [calm[1]]
    assert engine.tokens([head]) == [calm[0]]


def test_an_answer_is_evicted_from_at_every_boundary(engine):
    engine.tokens([text(40)], max_tokens=950)
    plans = [tier.plan for tier in engine.tiers]
    seen = [[held for group, held in engine.held["p0"] if group == i] for i in range(len(plans))]
    for plan, held in zip(plans, seen, strict=True):
        # A step knows one token more than the one before; the last gives its pages back.
        known = range(40, 40 + len(held))
        assert held == [held_pages(plan, boundary(plan, tokens - 1), tokens) for tokens in known]
    assert engine.moved > 3


# -- prompts -------------------------------------------------------------------------------------


def test_prompts_that_end_at_an_edge(engine):
    """Of a page, the window, a segment, an interval: whole or in chunks, together or alone."""
    prompts = texts(*edges(engine))
    together = engine.tokens(prompts)
    assert engine.moved > 0
    assert alone(engine, prompts) == together
    engine.in_chunks(50)
    assert engine.tokens(prompts) == together


@as_exact_as_vllm
def test_what_is_not_evicted_from_is_answered_as_without_eviction(engine, stock, make):
    """And engines without it in the same process are not disturbed, made before or after."""
    prompts = texts(*edges(engine))
    expected = answers(plainly(stock, prompts))
    assert answers(plainly(make(None), prompts)) == expected
    assert engine.tokens(prompts, extra_args={"kv_eviction": "none"}) == expected
    short = [prompt for prompt in prompts if len(prompt) + 8 <= first_move(engine)]
    assert engine.tokens(short) == expected[: len(short)]
    long = [text(700)]
    assert engine.tokens(long) != answers(plainly(stock, long)), "eviction changed no token"


# -- requests ------------------------------------------------------------------------------------


def test_each_of_n_answers_is_that_of_its_seed(engine):
    """All begin with one prompt, whose pages they share and move away from each other."""
    prompt, sampling = text(300), {"temperature": 1.0, "max_tokens": 40}
    several = engine.run({"n": prompt}, n=3, seed=5, **sampling)["n"].outputs
    found = [list(output.token_ids) for output in sorted(several, key=lambda o: o.index)]
    assert found == [alone(engine, [prompt], seed=5 + i, **sampling)[0] for i in range(3)]
    assert len({tuple(answer) for answer in found}) > 1
    likeliest = {"temperature": 1.0, "top_k": 1, "max_tokens": 40}  # vLLM refuses n without one
    both = engine.run({"n": prompt}, n=2, **likeliest)["n"].outputs
    assert [list(output.token_ids) for output in both] == 2 * alone(engine, [prompt], max_tokens=40)


def said(logprobs, tokens) -> list[float]:
    """The logprob of each token."""
    return [place[token].logprob for place, token in zip(logprobs, tokens, strict=True)]


def numbers(logprobs) -> list[dict[int, float]]:
    return [{token: found.logprob for token, found in place.items()} for place in logprobs if place]


@as_exact_as_vllm
def test_logprobs_before_the_first_move_are_those_without_eviction(engine, stock):
    prompts = texts(5, 33, 150)
    asked = {"logprobs": 3, "prompt_logprobs": 3}
    ours = engine.run({str(i): ids for i, ids in enumerate(prompts)}, **asked)
    for i, output in enumerate(plainly(stock, prompts, **asked)):
        for place in (lambda o: o.prompt_logprobs, lambda o: o.outputs[0].logprobs):
            pairs = zip(numbers(place(ours[str(i)])), numbers(place(output)), strict=True)
            for found, expected in pairs:
                assert found == pytest.approx(expected, abs=1e-3)


def test_logprobs_of_a_prompt_are_those_with_which_it_was_written(engine):
    """A token sees the same, whether it is read or sampled, in any chunks."""
    prompt = text(300)
    written = engine.run({"w": prompt}, max_tokens=250, logprobs=0)["w"].outputs[0]
    engine.forget()
    whole = [*prompt, *written.token_ids]
    found = []
    for chunk in (8192, 50, 50):  # the last could find it all in the prefix cache
        engine.in_chunks(chunk)
        read = engine.run({"r": whole}, max_tokens=1, prompt_logprobs=0)["r"].prompt_logprobs
        assert read[0] is None
        found.append(said(read[1:], whole[1:]))
    assert found[1] == found[2] == pytest.approx(found[0], abs=1e-3)
    sampled = said(written.logprobs, written.token_ids)
    assert found[0][len(prompt) - 1 :] == pytest.approx(sampled, abs=1e-3)
    assert all(number < 0 for number in found[0])


@pytest.fixture
def names_as_they_come(monkeypatch):
    """vLLM makes the names of requests unique, unless it is told not to when it starts."""

    def keep_name(request) -> None:
        request.external_req_id = request.request_id

    monkeypatch.setattr(InputProcessor, "assign_request_id", staticmethod(keep_name))


def test_a_name_that_comes_again_is_another_request(engine, names_as_they_come):
    """A worker is told of the end and of the new one in the same step."""
    first, second = texts(500, 400)
    expected = alone(engine, [first, second], max_tokens=30)
    for prompt, answer in zip((first, second, first), (*expected, expected[0]), strict=True):
        done = engine.run({"same": prompt}, max_tokens=30)["same"]
        assert answers([done]) == [answer]
    engine.forget()
    engine.in_chunks(150)
    for steps in (1, 2, 3):  # in mid-prefill, before and after its first move
        engine.add("same", first)
        for _ in range(steps):
            engine.step()
        engine.llm.llm_engine.abort_request(["same"])
        done = engine.run({"same": second}, max_tokens=30)["same"]
        assert answers([done]) == [expected[1]]


def test_an_abort_in_mid_prefill_changes_no_other_answer(engine):
    stays, goes = texts(450, 600)
    expected = alone(engine, [stays], max_tokens=40)
    engine.in_chunks(200)
    for steps in (1, 2, 4, 6):
        engine.forget()
        engine.add("goes", goes)
        engine.add("stays", stays, max_tokens=40)
        for _ in range(steps):
            engine.step()
        engine.llm.llm_engine.abort_request(["goes"])
        assert answers(engine.run({}).values()) == expected


# -- servers -------------------------------------------------------------------------------------


def test_the_prefix_cache_may_be_emptied_at_any_time(engine):
    """Running requests start anew, from their prompts and what they had answered."""
    prompts = texts(500, 300, 40)
    expected = alone(engine, prompts, max_tokens=100)
    engine.in_chunks(200)
    for number, prompt in enumerate(prompts):
        engine.add(f"r{number}", prompt, max_tokens=100)
    for steps in (2, 5, 30, 40):
        for _ in range(steps):
            engine.step()
        assert not engine.llm.reset_prefix_cache()
        assert engine.llm.reset_prefix_cache(reset_running_requests=True)
    done = engine.run({})
    assert [answers([done[f"r{i}"]])[0] for i in range(3)] == expected
    engine.in_chunks(8192)
    assert engine.run({"a": prompts[0]})["a"].num_cached_tokens > 0
    assert engine.llm.reset_prefix_cache()
    assert engine.run({"b": prompts[0]})["b"].num_cached_tokens == 0


@pytest.mark.parametrize("mode", ["abort", "keep"])
def test_nothing_of_the_pages_outlives_a_sleep(engine, mode):
    """On CPUs vLLM gives no memory back; here pages lose what they held, as they do on GPUs."""
    prompts = texts(500, 200)
    expected = alone(engine, prompts, max_tokens=40)
    for number, prompt in enumerate(prompts):
        engine.add(f"r{number}", prompt, max_tokens=40)
    for _ in range(12):
        engine.step()
    engine.llm.sleep(level=1, mode=mode)
    engine.poison(list(range(engine.pool.num_gpu_blocks)))
    assert engine.llm.wake_up()
    if mode == "abort":
        engine.llm.llm_engine.abort_request(["r0", "r1"])  # in this process nobody is told
    done = engine.run({})
    if mode == "keep":
        assert [answers([done[f"r{i}"]])[0] for i in range(2)] == expected
    assert engine.tokens(prompts, max_tokens=40) == expected


def test_adapters_share_no_pages(make, tmp_path):
    """The same prompt with two LoRA adapters: together, again, and alone; and with none.

    Not with none in their batch, which vLLM's layers for CPUs answer with one of the others.
    """
    asked = [lora.make_adapter(tmp_path, number) for number in (1, 2)]
    llm = make(SETTINGS["16 bits"], enable_lora=True, max_loras=2, max_lora_rank=8)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, detokenize=False)

    def answer(adapters: list) -> list:
        inputs = [{"prompt_token_ids": text(500)} for _ in adapters]
        return llm.generate(inputs, params, lora_request=adapters, use_tqdm=False)

    together, again = answer(asked), answer(asked)
    none = answer([None])
    assert none[0].num_cached_tokens == 0
    assert len({tuple(ids) for ids in answers([*together, *none])}) == 3
    assert answers(again) == answers(together)
    assert [output.num_cached_tokens for output in again] == 2 * [480]
    for adapter, expected in zip(asked, answers(together), strict=True):
        assert llm.reset_prefix_cache()
        assert answers(answer([adapter])) == [expected]
