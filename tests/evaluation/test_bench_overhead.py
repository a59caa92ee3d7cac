# SPDX-License-Identifier: Apache-2.0
"""What the planner costs: the clock, the profile, what is added, and what the page says of it."""

import cProfile
import itertools
import json
from types import SimpleNamespace

import pytest

from entropykv_vllm.evaluation import table
from entropykv_vllm.evaluation.bench_overhead import cell, command, hot, summary
from entropykv_vllm.evaluation.bench_overhead.parts import PARTS, PLANNER, Parts
from entropykv_vllm.plan.schedule import TierPlan, peak_pages
from tests.docs.markdown import ROOT


def test_a_part_is_timed_without_the_parts_inside_it():
    ticks = itertools.count()
    parts = Parts(lambda: float(next(ticks)))
    model = parts.on("model", lambda: next(ticks))
    runner = parts.on("runner", lambda: [model(), next(ticks), model()])
    parts.on("update", lambda: None)()  # before the step, so not of it
    _, times = parts.of(runner)
    assert times["model"] == 4  # two ticks, twice: what it did, and the clock
    assert times["step"] == sum(times[name] for name in (*PARTS, "rest"))
    assert times["update"] == 0
    assert times["runner"] == times["step"] - times["model"] - times["rest"] > 0


def test_a_part_that_fails_is_timed_all_the_same():
    ticks = itertools.count()
    parts = Parts(lambda: float(next(ticks)))

    def fails():
        return {}[0]

    def step():
        with pytest.raises(KeyError):
            parts.on("schedule", fails)()

    assert parts.of(step)[1]["schedule"] == 1


def test_prompts_are_spread_around_their_length():
    lengths = [len(ids) for ids in cell.prompts(64, 2000, 100)]
    assert len(set(lengths)) == 64
    assert sum(lengths) / 64 == pytest.approx(2000, abs=2)
    assert max(lengths) - min(lengths) < cell.SPREAD


def test_requests_that_wait_or_end_spoil_a_run():
    def engine(finished: bool, answers: int):
        outputs = [SimpleNamespace(finished=finished)] * answers
        return SimpleNamespace(step=lambda: outputs)

    parts = Parts(lambda: 0.0)
    assert len(cell.decode(engine(False, 2), parts, 2, 3)) == 3
    for spoiled in (engine(False, 1), engine(True, 2)):
        with pytest.raises(RuntimeError, match="of 2 decode"):
            cell.decode(spoiled, parts, 2, 3)


def test_the_profile_names_our_functions_only():
    plan = TierPlan("all", 32, 32, 64, 64, 64, 0.5, 0)
    profile = cProfile.Profile()
    profile.runcall(lambda: [peak_pages(plan, 64 * n) for n in range(3000, 3010)])
    found = hot.hottest(profile, steps=10, count=3)
    assert len(found) == 3
    assert all(one["function"].startswith("plan.schedule: ") for one in found)
    calls = {one["function"]: one["calls a step"] for one in hot.hottest(profile, 10, 99)}
    assert calls["plan.schedule: peak_pages"] == 1
    assert [one["µs a step"] for one in found] == sorted(
        (one["µs a step"] for one in found), reverse=True
    )


def steps(schedule: list[float]) -> dict[str, list[float]]:
    return {name: schedule if name == "schedule" else [0.0] * len(schedule) for name in PLANNER}


def test_rare_steps_count_in_the_mean_and_not_in_the_median():
    stock, ours = steps([1e-4] * 100), steps([3e-4] * 90 + [1e-3] * 10)
    found = summary.added(ours, stock)
    assert found["median"] == pytest.approx([2e-4, 2e-4, 2e-4])
    value, low, high = found["mean"]
    assert value == pytest.approx(2.7e-4)
    assert 2e-4 < low < value < high < 4e-4


def told(computed: bool) -> dict:
    def one(planner: float) -> dict:
        times = {name: [0.0] * 4 for name in (*PARTS, "rest", "step")}
        times |= {"schedule": [planner] * 4, "step": [0.05] * 4}
        return {"spec": {"computed": computed}, "steps": times, "hottest": []}

    return command.report({command.STOCK: one(0.001), "max": one(0.0015)})


def test_what_is_added_is_a_share_of_a_step_only_where_the_model_was_computed():
    (row,) = command.shares(told(computed=True))
    assert row == ["max", *["500 (500 to 500)"] * 2, "1.00 (1.00 to 1.00)", "5.0 (5.0 to 5.0)"]
    (row,) = command.shares(told(computed=False))
    assert row[3] == "–"
    assert command.costs(told(True))[1] == ["max", "1500", *["0"] * 6, "50.0"]


def test_the_pool_has_room_for_all_requests_in_full():
    args = command.parser().parse_args(["--steps", "10", "--requests", "3"])
    found = command.spec(args, ("none", {}))
    assert found["computed"]
    assert found["engine"]["kv_cache_memory_bytes"] >= 3 * found["engine"]["max_model_len"] * 23040
    assert found["engine"]["max_model_len"] > 2000 + cell.SPREAD + 10 + cell.PROFILED_STEPS


PAGE = ROOT / "docs/overhead.md"


def stored(name: str) -> dict:
    return json.loads((ROOT / f"docs/data/overhead/{name}.json").read_text())["settings"]


@pytest.mark.parametrize("name", ["before", "table", "model"])
def test_the_page_has_the_tables_that_were_measured(name):
    page, told = PAGE.read_text(), stored(name)
    assert table.render(command.COSTS, command.costs(told)) in page
    assert table.render(command.SHARES, command.shares(told)) in page
    assert name != "table" or command.profile(told) in page


def test_the_page_says_what_was_measured():
    page = PAGE.read_text()
    before, now = (
        f"{1e6 * stored(name)['balanced']['means']['metadata'][0]:,.0f} µs"
        for name in ("wide-before", "wide")
    )
    assert f"took {before} and takes {now}" in page
    most = max(one["added"]["mean"][0] for one in stored("table").values() if one["added"])
    assert "under 5 % of a step of 18 ms" in page
    assert most < 0.05 * 0.018
