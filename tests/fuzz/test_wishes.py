# SPDX-License-Identifier: Apache-2.0
"""What the fuzz takes for right, and what the product does, without a server between them."""

import random

import pytest
from pydantic import TypeAdapter

from entropykv_vllm.config.request import read
from entropykv_vllm.config.settings import EvictionConfig

from .wishes import shown, wish, wrong

#: How vLLM declares `vllm_xargs`.
XARGS = TypeAdapter(dict[str, str | int | float | list[str | int | float]])
TOKENS = 40


@pytest.mark.parametrize("typed", [True, False])
def test_both_readings_of_a_wish_agree(typed: bool) -> None:
    seen = set()
    for number in range(3000):
        asked = wish(random.Random(number), TOKENS, 0)
        refusal = _refusal(asked, typed)
        keys = wrong(asked, TOKENS, 0, typed)
        assert (refusal is None) == (not keys), (asked, refusal)
        assert refusal is None or any(shown(key) in refusal for key in keys), (asked, refusal)
        seen |= keys or {"none is wrong"}
    assert {"kv_eviction", "kv_keep", "kv_protect", "none is wrong"} <= seen


def _refusal(asked: dict, typed: bool) -> str | None:
    try:
        read(XARGS.validate_python(asked) if typed else asked, EvictionConfig(), TOKENS)
    except ValueError as error:
        return str(error)
    return None
