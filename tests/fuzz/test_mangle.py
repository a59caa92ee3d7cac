# SPDX-License-Identifier: Apache-2.0
"""Wrong values follow from a seed alone."""

from __future__ import annotations

import copy
import json
import random

from . import mangle

BODY = {"prompt": [1, 2], "stop": ["a"], "vllm_xargs": {"kv_keep": 0.5}, "n": 1}


def test_a_wrong_value_depends_on_no_other() -> None:
    before = copy.deepcopy(mangle.NASTY)
    for seed in range(20_000):
        json.dumps(mangle.with_wrong_value(random.Random(seed), BODY))
    assert repr(mangle.NASTY) == repr(before)
