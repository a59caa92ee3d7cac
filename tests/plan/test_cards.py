# SPDX-License-Identifier: Apache-2.0
"""What a card leaves for pages, and the estimate of what a step takes, against vLLM's own logs."""

from __future__ import annotations

import pytest

from entropykv_vllm.plan.cards import (
    CARDS,
    FIXED,
    Serving,
    activation_bytes,
    overhead_bytes,
    room_bytes,
)
from entropykv_vllm.plan.model_config import known_models
from entropykv_vllm.plan.model_shape import ModelShape, read_shape
from entropykv_vllm.plan.sizes import parse_bytes, parse_tokens, show_bytes, show_count

GIB = 1 << 30


def shape_of(name: str) -> ModelShape:
    return read_shape(known_models()[name])


@pytest.mark.parametrize(
    ("model", "requests", "gib"),
    [
        # What vLLM logged as "PyTorch activation peak memory takes": 256 requests and few.
        ("meta-llama/Llama-3.1-8B-Instruct", 256, 1.26),
        ("Qwen/Qwen2.5-7B-Instruct", 256, 1.42),
        ("Qwen/Qwen2.5-1.5B-Instruct", 256, 1.39),
        ("meta-llama/Llama-3.1-8B-Instruct", 8, 0.22),
    ],
)
def test_the_estimate_of_a_step_is_near_what_vllm_measured(model, requests, gib):
    found = activation_bytes(shape_of(model), Serving(requests=requests))
    assert found / GIB == pytest.approx(gib, rel=0.1)


def test_experts_widen_a_step_by_those_that_a_token_goes_through():
    mixture = activation_bytes(shape_of("mistralai/Mixtral-8x7B-Instruct-v0.1"), Serving())
    dense = activation_bytes(shape_of("mistralai/Mistral-7B-Instruct-v0.3"), Serving())
    assert dense < mixture < 3 * dense


def test_a_card_leaves_its_share_less_weights_and_work_space():
    serving = Serving(utilization=0.5, overhead=10**9)
    shape = shape_of("Qwen/Qwen2.5-7B-Instruct")
    assert overhead_bytes(shape, serving) == 10**9
    assert room_bytes(8 * 10**9, 2 * 10**9, 10**9, serving) == 10**9
    assert room_bytes(8 * 10**9, 4 * 10**9, 10**9, serving) < 0
    estimate = overhead_bytes(shape, Serving())
    assert estimate == FIXED + activation_bytes(shape, Serving())
    assert list(CARDS) == [8e9, 12e9, 16e9, 24e9, 80e9]


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("8192", 8192), ("32k", 32768), ("1M", 1 << 20), ("8,192", 8192), ("1.5K", 1536)],
)
def test_lengths_are_read(text, tokens):
    assert parse_tokens(text) == tokens


@pytest.mark.parametrize(
    ("text", "size"),
    [("8GB", 8e9), ("8", 8e9), ("8 gb", 8e9), ("24GiB", 24 * GIB), ("700MB", 7e8), ("7.5G", 7.5e9)],
)
def test_amounts_of_memory_are_read(text, size):
    assert parse_bytes(text) == size


def test_a_number_without_a_unit_is_in_gb_unless_said():
    assert [parse_bytes("24"), parse_bytes("24", bare=1)] == [24e9, 24]
    with pytest.raises(ValueError, match="'24' is not an amount"):
        parse_bytes("24", bare=None)


@pytest.mark.parametrize("text", ["", "many", "-8GB", "8TB", "8GB8", "0", "0k", "1e9"])
def test_what_is_neither_is_refused(text):
    for parse in (parse_bytes, parse_tokens):
        with pytest.raises(ValueError, match="is not a"):
            parse(text)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (5_570_123_456, "5.57 GB"),
        (838_000_000, "838 MB"),
        (65.6e9, "65.6 GB"),
        (999, "999 B"),
        (1_835_008, "1.84 MB"),
        (123_456_789_012, "123 GB"),
    ],
)
def test_amounts_of_memory_are_shown_with_three_digits(size, text):
    assert show_bytes(size) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(7_615_616_512, "7.62 billion"), (999_885_952, "1 billion"), (134_515_008, "135 million")],
)
def test_counts_are_shown_with_three_digits(count, text):
    assert show_count(count) == text
