# SPDX-License-Identifier: Apache-2.0
"""An answer that is not right is noticed."""

import json
import traceback
from collections import Counter

import pytest

from . import canaries, log
from .__main__ import one_sided
from .answers import ENDS, Answer, faults, status_of
from .bases import bases
from .cases import KINDS, Case, Right
from .clients import Tally
from .known import explains

RIGHT = Right((400,), ("kv_keep",))
STREAM = b'data: {"choices": []}\n\n'


def said(sentence: str, **more: object) -> bytes:
    return json.dumps({"error": {"message": sentence, **more}}).encode()


@pytest.mark.parametrize(
    ("right", "answer", "wrong"),
    [
        (RIGHT, Answer(400, said("kv_keep is 7"), "application/json"), ""),
        (RIGHT, Answer(200, b"{}", "application/json"), "HTTP 200 where 400 is right"),
        (RIGHT, Answer(400, said("no"), "application/json"), "does not say kv_keep"),
        (RIGHT, Answer(400, b'{"detail": ""}', "application/json"), "without a sentence"),
        (RIGHT, Answer(400, said("kv_keep, /x/site-packages/y"), "application/json"), "shows"),
        (RIGHT, Answer(400, said("kv_keep", param="/x/y.py:3"), "application/json"), "shows"),
        (Right(), Answer(500, said("oh"), "application/json"), "HTTP 500: oh"),
        (Right(), Answer(200, b"{", "application/json"), "not JSON"),
        (Right(), Answer(200, STREAM + b"data: [DONE]\n\n", "text/event-stream"), ""),
        (Right(), Answer(200, STREAM, "text/event-stream"), "ended early"),
        (Right(), Answer(200, b"data: {no\n\ndata: [DONE]\n", "text/event-stream"), "not JSON"),
        (
            Right(),
            Answer(200, b"data: " + said("oh", code=500) + b"\n", "text/event-stream"),
            "HTTP 500: oh",
        ),
    ],
)
def test_what_is_wrong_is_said(right: Right, answer: Answer, wrong: str) -> None:
    found = faults(Case("wish", "POST", "/v1/completions", right=right), answer)
    assert (wrong in found[0]) if wrong else found == []


@pytest.mark.parametrize("path", ENDS)
def test_each_stream_comes_to_its_end(path: str) -> None:
    case = Case("wish", "POST", path)
    assert faults(case, Answer(200, STREAM + ENDS[path] + b"\n", "text/event-stream")) == []
    (found,) = faults(case, Answer(200, STREAM, "text/event-stream"))
    assert "ended early" in found


def test_an_event_that_is_not_json_has_the_status_of_its_answer() -> None:
    assert status_of(Answer(200, b"data: {no\n", "text/event-stream")) == 200


def test_a_traceback_of_the_log_is_told_by_where_and_what() -> None:
    text = (
        "(EngineCore pid=7) ERROR 11-30 19:43:09 [core.py:75] Traceback (most recent call last):\n"
        '(EngineCore pid=7) ERROR 11-30 19:43:09 [core.py:75]   File "a.py", line 3, in run\n'
        "(EngineCore pid=7) ERROR 11-30 19:43:09 [core.py:75]     x()\n"
        "(EngineCore pid=7) ERROR 11-30 19:43:09 [core.py:75] KeyError: 3\n"
        'INFO: "POST /v1/completions HTTP/1.1" 200 OK\n'
    )
    assert log.complaints(text) == {'KeyError: 3, at File "a.py", line 3, in run': 1}


def test_canaries_that_are_answered_alike_tell_nothing() -> None:
    one, other = {"a": -0.1, "b": -3.0}, {"a": -0.4, "b": -2.0}
    assert canaries.distance(one, other) == 1.0
    assert canaries.distance(one, {"c": -0.1, "a": -3.0}) == float("inf")
    answers = dict.fromkeys(canaries.OPTIONS, one)
    assert len(canaries.alike(answers)) == 6
    assert len(canaries.alike({**answers, "none": other})) == 3


def test_a_library_s_traceback_is_the_caller_s() -> None:
    frames = (
        '  File "/x/{}/a.py", line 3, in f\n  File "/x/torch/b.py", line 4, in g\nKeyError: 3\n'
    )
    for caller, theirs in {"vllm": True, "entropykv_vllm": False}.items():
        (told,) = log.complaints("Traceback (most recent call last):\n" + frames.format(caller))
        assert explains(told) == theirs, told


def test_a_traceback_in_an_exception_group_is_told() -> None:
    """As of a stream: its task ends in a group, in whose lines the traceback stands."""
    try:
        raise ExceptionGroup("unhandled errors", [_raised(ValueError("broken"))])
    except ExceptionGroup as group:
        lines = "".join(traceback.format_exception(group)).splitlines()
    told = log.complaints("\n".join(f"(APIServer pid=7) {line}" for line in lines))
    assert [kind.partition(":")[0] for kind in told] == ["ExceptionGroup", "ValueError"]


def _raised(error: Exception) -> Exception:
    try:
        raise error
    except type(error) as raised:
        return raised


def test_a_traceback_that_ends_in_our_code_is_a_fault():
    assert explains('ValueError: empty, at File "/site-packages/transformers/x.py", line 3, in run')
    assert not explains('ValueError: empty, at File "/x/entropykv_vllm/serving/x.py", line 3, in f')
    assert not explains('AuditError: page 3, at File "/site-packages/vllm/x.py", line 3, in run')
    assert not explains("EngineDeadError")


def test_of_each_route_that_streams_the_end_is_known() -> None:
    routes = {base.path for base in bases() if "batch" not in base.path}
    assert routes == ENDS.keys()


def test_a_kind_that_was_never_refused_is_told() -> None:
    tally = Tally(Counter({(kind, code): 3 for kind in KINDS for code in ("200", "400")}))
    assert one_sided(tally) == []
    del tally.statuses["wish", "400"]
    assert one_sided(tally) == [("wish", "400")]
