# SPDX-License-Identifier: Apache-2.0
"""The decode benchmark: its order, what it times, its table."""

from types import SimpleNamespace

import pytest

from entropykv_vllm.evaluation import decode_bench, decode_cell, dummy, step_profile


class Engine:
    """Answers by script: the requests that get a token in each step."""

    def __init__(self, *steps: str, finished: bool = False):
        self.steps = iter(steps)
        self.finished = finished

    def step(self):
        return [SimpleNamespace(request_id=r, finished=self.finished) for r in next(self.steps)]


def test_reading_ends_when_every_request_has_answered():
    engine = Engine("", "a", "a", "ab", "ab")
    assert decode_cell.read(engine, batch=2) >= 0
    assert list(engine.steps) == ["ab"]


def test_only_steps_after_the_first_few_are_timed():
    engine = Engine(*["ab"] * (decode_cell.WARM_UP_STEPS + 5))
    assert len(decode_cell.decode(engine, batch=2, steps=5)) == 5
    assert not list(engine.steps)


def test_requests_that_wait_or_end_spoil_a_run():
    with pytest.raises(RuntimeError, match="1 of 2 requests"):
        decode_cell.decode(Engine("ab", "a"), batch=2, steps=5)
    with pytest.raises(RuntimeError, match="2 of 2 requests"):
        decode_cell.decode(Engine("ab", finished=True), batch=2, steps=5)


def test_a_stopwatch_adds_up_and_hands_on():
    watch = decode_cell.Stopwatch()
    double = watch.on(lambda number: 2 * number)
    assert double(3) == 6
    first = watch.seconds
    assert first > 0
    assert double(number=4) == 8
    assert watch.seconds > first


def test_speed_is_that_of_the_median_step():
    found = decode_cell.summary(4, 10.0, 0.2, [0.1, 0.1, 0.4], 0.3)
    assert found["tokens/s"] == pytest.approx(40)
    assert found["mean tokens/s"] == pytest.approx(20)
    assert found["moving share"] == pytest.approx(0.02)


def test_turns_go_batch_by_batch_and_change_sides():
    assert decode_bench.turns(["stock", "max"], [1, 4], 2) == [
        (1, "stock", 0),
        (1, "max", 0),
        (4, "stock", 0),
        (4, "max", 0),
        (1, "max", 1),
        (1, "stock", 1),
        (4, "max", 1),
        (4, "stock", 1),
    ]


def test_rows_have_medians_and_ratios_to_stock():
    def result(name: str, batch: int, speed: float, reading: float) -> dict:
        return {
            "spec": {"name": name, "batch": batch},
            "tokens/s": speed,
            "step seconds": batch / speed,
            "reading seconds": reading,
            "moving share": 0.0123,
        }

    stock = decode_bench.STOCK
    results = [
        result("max", 4, 30, 8),
        result(stock, 4, 9, 10),
        result(stock, 4, 11, 10),
        result(stock, 1, 5, 2),
        result("max", 1, 10, 1),
    ]
    assert decode_bench.rows(results) == [
        [stock, "1", "5.0", "1.00", "200.0", "2.0", "1.00", "–"],
        ["max", "1", "10.0", "2.00", "100.0", "1.0", "0.50", "1.23"],
        [stock, "4", "10.0", "1.00", pytest.approx("404.0"), "10.0", "1.00", "–"],
        ["max", "4", "30.0", "3.00", "133.3", "8.0", "0.80", "1.23"],
    ]
    assert len(decode_bench.HEADER) == 8


def test_all_settings_of_a_batch_get_the_same_pool_and_model(tmp_path):
    args = decode_bench.parser().parse_args(["--tokens", "512", "--layers", "3"])
    folder = dummy.write(decode_bench.model(args), tmp_path)
    found = [decode_bench.spec(args, folder, name, 4, 0) for name in decode_bench.settings(args)]
    assert len(found) == 7
    assert found[0]["policy"] == "none"
    assert all(each["engine"] == found[0]["engine"] for each in found)
    assert found[0]["engine"]["kv_cache_memory_bytes"] > 4 * 512 * 3 * 2 * 3 * 64 * 2
    assert found[0]["config"]["vocab_size"] == 4928  # a tenth of SmolLM2's, as its layers are
    assert found[0]["engine"]["max_model_len"] <= found[0]["config"]["max_position_embeddings"]


def test_a_profile_adds_up_to_the_step():
    times = [
        ("entropykv::attention", 2.0),
        ("entropykv::collapse", 0.5),
        ("aten::mm", 1.0),
        ("x", 0.25),
    ]
    parts = step_profile.summary(times, seconds=5.0, steps=2)
    assert parts["attention"] == 1.0
    assert parts["moving pages"] == 0.25
    assert parts["matrix products"] == 0.5
    assert parts[step_profile.OTHER] == 0.125
    assert sum(parts.values()) == pytest.approx(2.5)


def test_operations_that_run_are_seen():
    import torch

    parts = step_profile.of(lambda: torch.ones(300, 300) @ torch.ones(300, 300), steps=3)
    assert parts["matrix products"] > 0
    assert parts["attention"] == 0


def test_only_profiled_cells_are_in_the_profile():
    parts = {"attention": 0.03, "matrix products": 0.01}
    spec = {"name": "max", "batch": 4}
    assert decode_bench.profile_rows([{"spec": spec, "parts": parts}, {"spec": spec}]) == [
        ["max", "4", "30.0 (75%)", "10.0 (25%)"]
    ]
