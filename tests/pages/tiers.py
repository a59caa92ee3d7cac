# SPDX-License-Identifier: Apache-2.0
"""Tiers for tests: some that stand for what people set, and any others that requests can share."""

import math
import random

from hypothesis import strategies as st

from entropykv_vllm.plan.schedule import TierPlan

PAGE = 4

TIERS = {
    "one tier": [TierPlan("all", PAGE, PAGE, 16, 32, 16, 0.5, 4)],
    "odd ratios": [
        TierPlan("early", PAGE, PAGE, 16, 32, 24, 0.75, 4),
        TierPlan("middle", PAGE, PAGE, 16, 32, 8, 0.3, 4),
    ],
    "capped": [
        TierPlan("capped", PAGE, PAGE, 16, 32, 16, 0.5, 4, cap=32),
        TierPlan("full but capped", PAGE, PAGE, 16, 32, 16, 1.0, 4, cap=48),
    ],
    "whole and window": [
        TierPlan("whole", PAGE, PAGE, 16, 32, 16, 1.0, 4),
        TierPlan("sinks", PAGE, PAGE, 16, 32, 12, 0.0, 4),
        TierPlan("window", PAGE, PAGE, 16, 32, 40, 0.0, 0),
    ],
    "long segments": [TierPlan("all", PAGE, PAGE, 64, 32, 8, 0.25, 2)],
    "quantized": [TierPlan("all", PAGE, 14, 28, 32, 28, 1.0, 4, bits=4)],
    "quantized and evicted": [
        TierPlan("four", PAGE, 14, 28, 32, 12, 0.4, 4, bits=4),
        TierPlan("eight", PAGE, 6, 24, 32, 16, 1.0, 4, bits=8),
        TierPlan("sixteen", PAGE, PAGE, 16, 32, 8, 0.5, 4),
    ],
    "quantized and capped": [
        TierPlan("capped", PAGE, 14, 56, 32, 16, 0.7, 4, cap=50, bits=4),
        TierPlan("full but capped", PAGE, 7, 28, 32, 16, 1.0, 4, cap=60, bits=8),
    ],
}


def random_tiers(rng: random.Random) -> list[TierPlan]:
    """One to three tiers of one page size and one interval."""
    interval = PAGE * rng.randint(3, 12)
    return [_random_tier(rng, f"tier {i}", interval) for i in range(rng.randint(1, 3))]


def tiers() -> st.SearchStrategy[list[TierPlan]]:
    """As `random_tiers`, for hypothesis."""
    return st.randoms(use_true_random=False).map(random_tiers)


def _random_tier(rng: random.Random, name: str, interval: int) -> TierPlan:
    bits = rng.choice([16, 8, 4])
    cold = PAGE if bits == 16 else rng.randint(PAGE + 1, 4 * PAGE)
    return TierPlan(
        name=name,
        page=PAGE,
        cold=cold,
        segment=math.lcm(PAGE, cold) * rng.randint(1, 3),
        interval=interval,
        window=rng.randint(PAGE, 40),
        keep=rng.choice([0.0, 0.1, 0.35, 0.5, 0.8, 1.0]),
        sinks=rng.randint(0, PAGE),
        cap=rng.choice([None, rng.randint(cold, 80)]),
        bits=bits,
    )
