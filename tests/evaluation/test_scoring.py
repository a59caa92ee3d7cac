# SPDX-License-Identifier: Apache-2.0
"""Scores of answers written by hand."""

import pytest

from entropykv_vllm.evaluation import scoring

NUMBER = "7264391"


@pytest.mark.parametrize(
    ("answer", "exact", "digits", "form"),
    [
        (" 7264391.", True, 1, True),
        (" 7,264,391, and", True, 1, True),
        (" 7264391. The number 5 is", True, 1, True),
        (" 7264390", False, 6 / 7, True),
        (" 726439", False, 6 / 7, True),  # one short: still the form of the number
        (" 72643911", False, 1, True),  # one more: all digits in place, but not the number
        (" 726", False, 3 / 7, False),
        (" 264391", False, 0, True),  # a lost digit shifts the others out of their place
        (" 99.99999", False, 0, False),
        (" not known.", False, 0, False),
        ("", False, 0, False),
        (" the year 1593, 7264391", False, 0, False),  # the first number counts
    ],
)
def test_answers(answer, exact, digits, form):
    assert scoring.exact(answer, NUMBER) is exact
    assert scoring.digits(answer, NUMBER) == pytest.approx(digits)
    assert scoring.form(answer, NUMBER) is form


def test_wilson_intervals_are_the_textbook_ones():
    assert scoring.wilson(48, 48) == pytest.approx((0.9259, 1.0), abs=1e-3)
    assert scoring.wilson(0, 10) == pytest.approx((0.0, 0.2775), abs=1e-3)
    assert scoring.wilson(24, 48) == pytest.approx((0.3639, 0.6361), abs=1e-3)
    for n in range(1, 100):
        assert scoring.wilson(0, n)[0] == 0
        assert scoring.wilson(n, n)[1] == 1
    assert scoring.wilson(0, 0) == (0.0, 1.0)


def test_the_bootstrap_covers_the_mean_and_repeats():
    values = [i / 10 for i in range(11)] * 4
    low, high = scoring.bootstrap(values)
    assert 0.35 < low < 0.5 < high < 0.65
    assert scoring.bootstrap(values) == (low, high)
    assert scoring.bootstrap([1.0] * 5) == (1.0, 1.0)


def test_the_summary_has_each_share_with_its_interval():
    summary = scoring.summary([" 7264391", " 7264392", " no"], [NUMBER] * 3)
    assert summary["exact"][0] == pytest.approx(1 / 3)
    assert summary["digits"][0] == pytest.approx((1 + 6 / 7) / 3)
    assert summary["form"][0] == pytest.approx(2 / 3)
    assert all(low <= share <= high for share, low, high in summary.values())


def test_commas_join_as_thousands_are_written_and_else_part():
    assert scoring.NUMBER.findall(" 12345,67890,11111") == ["12345", "67890", "11111"]
    assert scoring.NUMBER.findall(" 1,234,567, 12,34 123,4567") == [
        *("1,234,567", "12", "34", "123", "4567")
    ]
