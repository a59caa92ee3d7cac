# SPDX-License-Identifier: Apache-2.0
"""Tables as the attention op reads them, against the plan that made them."""

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from entropykv_vllm.attention.split import hot_starts, split
from entropykv_vllm.plan.request import AS_SERVED, Control, request_plan
from entropykv_vllm.plan.schedule import TierPlan, boundary, cold_pages, hot_start

QUANTIZED = TierPlan("t", 32, 112, 224, 96, 64, 0.5, 4, bits=4)
PLANS = [
    QUANTIZED,
    replace(QUANTIZED, keep=1.0),
    replace(QUANTIZED, cap=336),
    TierPlan("t", 32, 32, 128, 96, 64, 0.3, 4),
    TierPlan("t", 32, 32, 128, 96, 64, 1.0, 4),
    TierPlan("t", 32, 32, 32, 32, 32, 0.0, 0),
]


@st.composite
def steps(draw):
    """A plan and requests, each with the tokens before the step and those of the step."""
    plan = draw(st.sampled_from(PLANS))
    requests = []
    for _ in range(draw(st.integers(1, 4))):
        before = draw(st.integers(0, 1500))
        room = boundary(plan, before) + plan.interval - before
        requests.append((before, draw(st.integers(1, room))))
    return plan, requests


WISHES = [AS_SERVED, Control(off=True), Control(keep=0.3), Control(protect=((0, 50), (700, 800)))]


def row_of(plan, before, new, first_page):
    """A request's table with holes, and which pages are cold."""
    at = boundary(plan, before)
    start = hot_start(plan, at) // plan.page
    entries = [0] * -(-(before + new) // plan.page)
    cold = [page.entry for page in cold_pages(plan, at)]
    for i, entry in enumerate([*cold, *range(start, len(entries))]):
        entries[entry] = first_page + i
    return entries, [entries[entry] for entry in cold], entries[start:]


@settings(deadline=None)
@given(steps(), st.lists(st.sampled_from(WISHES), min_size=4, max_size=4))
def test_a_step_sees_the_pages_of_its_plan(case, wishes):
    """Also where some requests are not evicted, keep less than others, or protect some tokens."""
    plan, requests = case
    plans = [request_plan(plan, wish) for wish in wishes]
    rows = [row_of(plans[i], *request, 1 + 100 * i) for i, request in enumerate(requests)]
    # What lies behind a row is left over from other requests.
    table = torch.full((len(rows), 64), 77, dtype=torch.int32)
    for row, (entries, _, _) in zip(table, rows, strict=True):
        row[: len(entries)] = torch.tensor(entries)
    before = table.clone()
    lens = torch.tensor([old + new for old, new in requests], dtype=torch.int32)
    new = torch.tensor([new for _, new in requests], dtype=torch.int32)

    compacted, cold, hot = split(plan, hot_starts(plan, 3000), table, lens, new)

    assert torch.equal(table, before), "vLLM shares the table between groups"
    assert compacted.dtype == cold.dtype == hot.dtype == torch.int32
    for i, (_, cold_of_row, hot_of_row) in enumerate(rows):
        pages = [*cold_of_row, *hot_of_row]
        assert compacted[i, : len(pages)].tolist() == pages
        assert not compacted[i, len(pages) :].any()
        if plan.bits == 16 and not plans[i].compresses:
            continue  # cold pages are as hot ones, so where they begin does not matter
        assert cold[i] == len(cold_of_row)
        assert -(-int(hot[i]) // plan.page) == len(hot_of_row)
        assert int(lens[i] - hot[i]) == hot_start(plans[i], boundary(plan, requests[i][0]))
