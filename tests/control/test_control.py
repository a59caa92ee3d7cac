# SPDX-License-Identifier: Apache-2.0
"""Random cases played on the control plane; `make explore` plays as many as there is time for."""

from collections import Counter

import pytest

from entropykv_vllm.plan.schedule import TierPlan

from .case import ACTIONS, Abort, Ask, Case, More, Plan, Setup, make_case, tokens
from .shrink import again, failure, shrunk
from .world import play

#: Cases of a test.
CASES = 50

#: What must have happened in a test's cases, or they say little.
NEEDED = (
    *("hits", "preempted", "collapse", "merge", "drop", "copied", "wishes"),
    "beside others in flight",
)


@pytest.mark.parametrize("first", range(0, 4 * CASES, CASES))
def test_each_page_that_is_read_holds_what_the_plan_says(first):
    seen: Counter[str] = Counter()
    for seed in range(first, first + CASES):
        try:
            seen += play(make_case(seed))
        except Exception as error:
            raise AssertionError(f"to see it again, and smaller: {again(seed, ACTIONS)}") from error
    assert not [what for what in NEEDED if not seen[what]], seen


def test_a_case_is_a_function_of_its_seed():
    case = make_case(3)
    assert case == make_case(3)
    assert play(case) == play(case)
    assert case != make_case(4)


def test_a_case_that_fails_is_made_small():
    """Here a case fails if a request comes, and later one of its name is aborted."""
    wrong = "AssertionError", "somewhere"

    def fails(tried: Case):
        asked = set()
        for action in tried.actions:
            if isinstance(action, Ask) and len(tokens(action.prompt)) > 3:
                asked.add(action.name)
            if isinstance(action, Abort) and action.name in asked:
                return wrong
        return None

    case = next(filter(fails, map(make_case, range(100))))
    assert len(case.actions) > 2
    small = shrunk(case, wrong, fails)
    asked, aborted = small.actions
    assert isinstance(asked, Ask)
    assert aborted == Abort(asked.name)
    assert len(tokens(asked.prompt)) <= 4
    assert not small.setup.windows
    assert len(small.setup.tiers) == 1


def test_how_a_case_fails_is_told(monkeypatch):
    case = Case(make_case(1, 0).setup, (Plan(1),))
    assert failure(case) is None
    monkeypatch.setattr("tests.control.world.World._check_end", lambda self: 1 / 0)
    assert failure(case) == ("ZeroDivisionError", "<lambda>")


def test_a_session_that_starts_anew_leaves_its_place_in_the_batch():
    """It outgrows the pool in the way that it asked for, while others take all places."""
    tier = TierPlan("all", 4, 10, 60, 24, 12, 1.0, 2, cap=68, bits=8)
    setup = Setup(
        tiers=(tier,),
        windows=(31,),
        slack=1,
        longest=260,
        budget=40,
        seats=2,
        caching=True,
        ahead=True,
        depth=2,
        priority=False,
        v2=True,
        waves=False,
    )
    session = Ask("session", ((1, 113),), 1, 0, False, 0, True, off=True)
    others = (
        Ask("a", ((0, 65),), 1, 0, False, 0, False),
        Ask("b", ((-1, 1),), 1, 0, False, 0, False),
    )
    actions = session, More("session", ((0, 31), (0, 8)), 1), *others
    assert play(Case(setup, actions))["wishes"] == 1
