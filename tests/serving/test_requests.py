# SPDX-License-Identifier: Apache-2.0
"""What requests may ask for: what is said of wrong wishes, and that wishes never stop a server."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm.exceptions import VLLMValidationError

from entropykv_vllm.config.request import read
from entropykv_vllm.config.settings import CONFIG_KEY, load
from entropykv_vllm.pages.control import control_of
from entropykv_vllm.plan.pool import Evicted, Pool
from entropykv_vllm.plan.request import AS_SERVED, Control, before, joined, request_plan
from entropykv_vllm.plan.schedule import TierPlan, cold_pages, peak_pages
from entropykv_vllm.serving import requests, room
from entropykv_vllm.serving.messages import message_span
from entropykv_vllm.serving.room import controlled

from ..simulation.scheduled import Server, make_scheduler
from .test_sessions import part, run

SETTINGS = load("entropykv", {"preset": "long-context"})
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)


def said(extra, settings=SETTINGS, tokens=1000) -> str:
    with pytest.raises(ValueError, match=r".") as caught:
        read(extra, settings, tokens)
    return str(caught.value)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"kv_eviction": "h2o"}, "this server evicts with entropykv, so say 'entropykv' or 'none'"),
        ({"kv_eviction": "none", "kv_keep": 0.5}, "leave kv_keep out"),
        ({"kv_keep": 0}, "kv_keep is 0: give a number above 0, at most 1"),
        ({"kv_keep": float("nan")}, "kv_keep is nan: give a number above 0, at most 1"),
        ({"kv_keep": True}, "kv_keep is True: give a number above 0, at most 1"),
        ({"kv_keep": "0.5"}, "kv_keep is '0.5': give a number"),
        ({"kv_protect": ["0:1001"]}, "'0:1001', which is not a span of this prompt of 1000 tokens"),
        ({"kv_protect": ["7:7"]}, "start before the end"),
        ({"kv_protect": ["-5:7"]}, "a span of tokens as in Python"),
        ({"kv_protect": ["1" * 5000 + ":"]}, "a span of tokens as in Python"),
        ({"kv_protect": "all"}, "a span of tokens as in Python"),
        ({"kv_protect": 0}, "names message 0, and this request has no messages"),
        ({"kv_protect": ["0:1"] * 65}, "has 65 entries: give at most 64"),
        ({"kv_evict": "none"}, "cannot ask for 'kv_evict': there are kv_eviction, kv_keep, kv_pro"),
        ({"kv_keep": 0.5, "kv_" + "b" * 5000: 8}, "cannot ask for 'kv_bbb"),
    ],
)
def test_a_wrong_wish_is_refused_in_words(extra, words):
    assert words in said(extra)
    assert len(said(extra)) < 300


def test_keys_of_others_are_left_alone():
    others = {"kv_transfer_params": {}, "window_size": 8, 7: 8}
    assert read(others, SETTINGS, 10) == AS_SERVED
    assert read({"kv_of_another_plugin": 1}, None, 10) == AS_SERVED


def test_a_server_that_does_not_evict_says_so():
    assert "this server does not evict: leave kv_keep out" in said({"kv_keep": 0.5}, None)
    assert read({"kv_eviction": "none"}, None, 10) == AS_SERVED


@pytest.mark.parametrize("policy", ["sink", "window"])
def test_keep_has_no_meaning_where_nothing_old_is_kept(policy):
    assert "has no meaning" in said({"kv_keep": 0.5}, load(policy))


def test_keep_has_no_effect_where_each_tier_names_its_own():
    tiers = [{"name": "a", "layers": "0-3", "keep": 0.5}]
    assert "has no effect" in said({"kv_keep": 0.5}, load("entropykv", {"tiers": tiers}))


def test_what_is_not_ours_is_left_alone():
    assert (
        read(
            {"kv_transfer_params": {}, "kv_cache_report_mode": "full", "session_id": "7"},
            SETTINGS,
            10,
        )
        == AS_SERVED
    )
    assert read(None, SETTINGS, 10) == AS_SERVED
    assert read({"kv_keep": None}, SETTINGS, 10) == AS_SERVED


def test_spans_are_read_as_in_python():
    assert read({"kv_protect": ["10:20", ":4", "990:"]}, SETTINGS, 1000).protect == (
        (0, 4),
        (10, 20),
        (990, 1000),
    )
    assert read({"kv_protect": ":"}, SETTINGS, 1000).protect == ((0, 1000),)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from(["kv_eviction", "kv_keep", "kv_protect"]), JSON))
def test_anything_is_read_or_refused_in_words(extra):
    refusal = ""
    try:
        assert isinstance(read(extra, SETTINGS, 100), Control)
    except ValueError as error:
        refusal = str(error)
    assert len(refusal) < 300
    assert "\n" not in refusal


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), max_size=8), st.integers(0, 60))
def test_joined_spans_hold_the_same_numbers(spans, end):
    numbers = {n for first, last in spans for n in range(first, last)}
    found = joined(spans)
    assert {n for first, last in found for n in range(first, last)} == numbers
    assert all(a[1] < b[0] for a, b in pairwise(found))
    assert {n for a, b in before(found, end) for n in range(a, b)} == {
        n for n in numbers if n < end
    }


PLAN = TierPlan("t", 32, 112, 224, 224, 224, 1 / 16, 4, bits=4)


def test_a_plan_for_a_request():
    assert request_plan(PLAN, AS_SERVED) == PLAN
    assert not request_plan(PLAN, Control(off=True)).compresses
    assert request_plan(PLAN, Control(keep=4)).keep == 0.25
    assert request_plan(PLAN, Control(keep=99)).keep == 1
    fixed = TierPlan("t", 32, 32, 256, 512, 256, 0.5, 4, fixed=True)
    assert request_plan(fixed, Control(keep=0.5)).keep == 0.5


def test_protected_tokens_keep_their_segments_whole():
    """Tokens 300 to 500 lie in the segments 1 and 2: four pages of 112 tokens."""
    plan = request_plan(PLAN, Control(protect=((300, 500),)))
    assert plan.protected == ((1, 3),)
    pages = cold_pages(plan, 224 * 12)
    whole = [page for page in pages if page.kind == "segment" and page.anchor in (13, 20)]
    assert [(page.entry, page.index) for page in whole] == [(7, 0), (8, 1), (14, 0), (15, 1)]


def make(pages: int):
    pool = Pool(1, (Evicted(TierPlan("all", 4, 4, 16, 32, 16, 0.25, 0)),))
    return make_scheduler(Server(pool, pages, 1000, 8, 32)), pool


def wish(name: str, tokens: int, answer: int, **extra):
    request = part(name, tokens, answer)
    request.resumable = False
    request.sampling_params.extra_args = extra
    return request


def test_a_request_that_is_not_evicted_ends_where_the_pool_does():
    scheduler, _ = make(pages=60)
    request = wish("a", 100, 1000, kv_eviction="none")
    scheduler.add_request(request)
    run(scheduler, 400)
    assert not scheduler.requests
    assert request.num_tokens == 60 * 4


@pytest.mark.parametrize("extra", [{"kv_eviction": "none"}, {"kv_keep": 7}, {"kv_protect": [0]}])
def test_what_no_server_let_through_does_not_stop_the_scheduler(extra):
    """Too long for the pool, or wrong: served as any other request, and those behind it too."""
    scheduler, pool = make(pages=60)
    assert pool.peak(400) <= 60 < 100
    first, second = wish("a", 400, 3, **extra), wish("b", 50, 3)
    scheduler.add_request(first)
    scheduler.add_request(second)
    assert control_of(first) == AS_SERVED
    assert first.sampling_params.extra_args is None, "workers must not think that it was granted"
    run(scheduler, 60)
    assert not scheduler.requests
    assert first.num_tokens == 403


def test_a_request_may_ask_for_more_tokens_than_there_are_numbers():
    """Not all ways into an engine bound what is to be answered."""
    scheduler, _ = make(pages=60)
    request = wish("a", 100, 2**62, kv_eviction="none")
    scheduler.add_request(request)
    assert request.max_tokens == 60 * 4 - 100


def test_a_pool_is_seen_with_the_eyes_of_a_request():
    pool = Pool(1, (Evicted(PLAN), Evicted(PLAN)))
    assert controlled(pool, Control(off=True)).peak(2240) == 2 * 70
    assert controlled(pool, AS_SERVED).peak(2240) == 2 * peak_pages(PLAN, 2240)


def test_pages_that_vllm_keeps_free_are_not_promised(monkeypatch):
    """The scheduler would serve such a request as any other."""
    monkeypatch.setattr(room, "_pool_of", lambda config: Pool(1, (Evicted(PLAN),)))
    config = server()
    config.cache_config.num_gpu_blocks = 101
    config.scheduler_config.watermark = 0.1
    room.check_room(config, Control(off=True), 90 * 32 - 1)
    with pytest.raises(ValueError, match=r"would take 91 pages .* has 90"):
        room.check_room(config, Control(off=True), 90 * 32)


def text_of(content) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


async def render(request):
    """A chat template that trims, and tokens that are bytes."""
    text = "".join(f"<{m['role']}>{text_of(m['content']).strip()}</>" for m in request.messages)
    return request.messages, [{"prompt_token_ids": [*f"{text}<answer>".encode()]}]


class Chat(SimpleNamespace):
    def model_copy(self, update, deep):
        return Chat(**{**vars(self), **update})


def span_of(messages: list[dict], index: int, **more) -> str:
    chat = Chat(messages=messages, **more)
    prompt = asyncio.run(render(chat))[1][0]["prompt_token_ids"]
    span = asyncio.run(message_span(chat, index, prompt, render))
    if not span:
        return ""
    first, end = map(int, span.split(":"))
    return bytes(prompt[first:end]).decode()


@given(st.lists(st.text(min_size=1, max_size=9), min_size=1, max_size=4), st.data())
def test_a_message_is_found_wherever_it_stands(texts, data):
    """Also where it is as others are, or reads as the template does."""
    messages = [{"role": "user", "content": text} for text in texts]
    index = data.draw(st.integers(-len(texts), len(texts) - 1))
    assert span_of(messages, index) == texts[index].strip()


@pytest.mark.parametrize(
    "text", ["\U0001f600", "\ue000", "\U000f0001", "\U00100042\ue000", " \u4e00 "]
)
def test_a_message_may_share_bytes_with_what_stands_for_it(text):
    for content in (text, [{"type": "text", "text": "a"}, {"type": "text", "text": text}]):
        messages = [{"role": "user", "content": content}]
        assert span_of(messages, 0) == text_of(content).strip()


@pytest.mark.parametrize("text", ["user", "<user>", "</>", "", "a"])
def test_words_of_the_template_are_not_taken_for_a_message(text):
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": text}]
    assert span_of(messages, 1) == text


@pytest.mark.parametrize(
    ("messages", "index", "more", "words"),
    [
        ([{"role": "user", "content": "a"}], 1, {}, "and there are 1: count from 0"),
        ([{"role": "user", "content": "a"}], -2, {}, "and there are 1: count from 0"),
        ([{"role": "user", "content": "a"}], 10**400, {}, r"10{59}\.\.\., and there are 1"),
        ([{"role": "assistant", "tool_calls": []}], 0, {}, "which has no text"),
        ([{"role": "user", "content": "a"}], 0, {"truncate_prompt_tokens": 5}, "that is cut"),
    ],
)
def test_a_message_that_cannot_be_found_is_refused_in_words(messages, index, more, words):
    with pytest.raises(ValueError, match=words):
        asyncio.run(message_span(Chat(messages=messages, **more), index, [1], render))


def server(**settings) -> SimpleNamespace:
    """The configuration of a server whose pages can't be counted from outside."""
    config = {CONFIG_KEY: {"policy": "entropykv", **settings}}
    return SimpleNamespace(
        additional_config=config,
        cache_config=SimpleNamespace(num_gpu_blocks=0),
        parallel_config=ONE,
        scheduler_config=SimpleNamespace(watermark=0.0),
    )


ONE = SimpleNamespace(data_parallel_size=1)


def process(prompt: dict, **extra):
    """What vLLM's input processor makes of a prompt, and we of that."""
    from vllm.sampling_params import SamplingParams

    made = SimpleNamespace(
        sampling_params=SamplingParams(extra_args=extra),
        **{"prompt_token_ids": None, "prompt_embeds": None, **prompt},
    )
    processor = SimpleNamespace(vllm_config=server())
    return requests._processing(lambda self, params: made)(processor, made.sampling_params)


@pytest.mark.parametrize(
    "prompt", [{"prompt_token_ids": [7] * 5}, {"prompt_embeds": torch.zeros(5, 8)}]
)
def test_prompts_are_counted_however_they_come(prompt):
    process(prompt)
    process(prompt, kv_protect=["0:5"])
    with pytest.raises(VLLMValidationError, match="a span of this prompt of 5 tokens"):
        process(prompt, kv_protect=["0:6"])


def rendered(chat: Chat) -> tuple[list[bool], object]:
    """What a chat gets of vLLM's renderer, and which renderings left images' cache alone."""
    seen = []

    async def render_chat(self, request, skip_mm_cache=False):
        seen.append(skip_mm_cache)
        return await render(request)

    renderer = SimpleNamespace(renderer=SimpleNamespace(config=server()))
    renderer.create_error_response = lambda error: error
    return seen, asyncio.run(requests._rendering(render_chat)(renderer, chat))


def test_renderings_that_only_look_for_messages_leave_the_cache_of_images_alone():
    """The engine has a mirror of it, and gets only the first."""
    messages = [{"role": "user", "content": "abc"}, {"role": "user", "content": "d"}]
    chat = Chat(messages=messages, vllm_xargs={"kv_protect": [0, 1]})
    assert rendered(chat)[0] == [False, True, True]
    assert chat.vllm_xargs == {"kv_protect": ["6:9", "18:19"]}


@pytest.mark.parametrize("entry", [0.0, 1.0, "", True, False])
def test_what_is_equal_to_an_index_is_not_taken_for_one(entry):
    """It is refused where it stands alone, so beside an index too."""
    messages = [{"role": "user", "content": "abc"}, {"role": "user", "content": "d"}]
    for entries in ([entry], [0, 1, entry]):
        error = rendered(Chat(messages=messages, vllm_xargs={"kv_protect": entries}))[1]
        assert f"kv_protect has {entry!r}: give the index of a message" in str(error)


def test_a_message_without_tokens_protects_nothing():
    chat = Chat(messages=[{"role": "user", "content": ""}], vllm_xargs={"kv_protect": [0]})
    rendered(chat)
    assert chat.vllm_xargs == {"kv_protect": []}


def test_a_refusal_is_returned_as_vllms_own_are():
    """`/v1/messages` writes what is raised into the log, with all that called it."""
    chat = Chat(messages=[{"role": "user", "content": "abc"}], vllm_xargs={"kv_keep": 2})
    error = rendered(chat)[1]
    assert isinstance(error, VLLMValidationError)
    assert "kv_keep is 2" in str(error)


def test_beam_search_whose_requests_are_others_is_refused():
    messages = [{"role": "user", "content": "abc"}]
    plain = Chat(messages=messages, use_beam_search=True, vllm_xargs={"kv_eviction": "entropykv"})
    assert isinstance(rendered(plain)[1], tuple)
    asks = Chat(messages=messages, use_beam_search=True, vllm_xargs={"kv_eviction": "none"})
    assert "leave kv_eviction, kv_keep and kv_protect out" in str(rendered(asks)[1])


def test_tokens_with_parameters_of_their_own_are_checked_before_an_answer_begins():
    """Of `/inference/v1/generate`, which streams before the engine has seen a request."""
    from vllm.sampling_params import SamplingParams

    async def preprocess_completion(self, request, **kwargs):
        return [{"prompt_token_ids": request.token_ids}]

    def take(**extra):
        request = SimpleNamespace(
            token_ids=[7] * 5, sampling_params=SamplingParams(extra_args=extra)
        )
        renderer = SimpleNamespace(renderer=SimpleNamespace(config=server()))
        return asyncio.run(requests._taking(preprocess_completion)(renderer, request))

    assert take(kv_protect=["0:5"]) == [{"prompt_token_ids": [7] * 5}]
    with pytest.raises(VLLMValidationError, match="a span of this prompt of 5 tokens"):
        take(kv_protect=["0:6"])
