# SPDX-License-Identifier: Apache-2.0
"""The kernel benchmark: what it compares, how it counts, and that it runs. Nothing about speed."""

import json

import pytest
import torch

from entropykv_vllm.errors import RunError
from entropykv_vllm.evaluation import machine, timing
from entropykv_vllm.evaluation.bench_kernels import command, pools, rows
from entropykv_vllm.evaluation.bench_kernels.shapes import (
    FORMATS,
    Case,
    Format,
    Shape,
    bytes_read,
    cold_tokens,
    pages,
    segment,
    sets,
)
from entropykv_vllm.kernels import formats, native

SHAPE = Shape(32, 8, 128)


def parsed(*words):
    return command.parse(words)


@pytest.mark.parametrize("text", ["32/8", "32/7/128", "a/b/c", "32/8/120", "0/8/128"])
def test_a_wrong_head_shape_is_refused(text, capsys):
    with pytest.raises(SystemExit):
        parsed("--shapes", text)
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("context", [0, 31, 4095, 16384])
def test_pages_hold_exactly_the_tokens_of_a_case(kind, context):
    case = Case("decode", SHAPE, 4, context)
    held = pages(case, kind)
    assert held.cold * cold_tokens(SHAPE, kind) + held.hot_tokens == case.tokens
    assert 1 <= held.hot_tokens <= cold_tokens(SHAPE, kind)
    assert (held.total - held.cold) * kind.page >= held.hot_tokens


def test_fewer_bits_read_fewer_bytes():
    case = Case("decode", SHAPE, 1, 32767)
    full, eight, four = (bytes_read(case, kind) for kind in FORMATS)
    assert full == case.total_bytes == 32768 * 4096
    assert 1.7 < full / eight < 2
    assert 3.3 < full / four < 4


def test_without_a_context_only_one_format_is_measured():
    assert Case("prefill", SHAPE, 1, 0, 2048).formats == FORMATS[:1]
    assert Case("prefill", SHAPE, 1, 1, 2048).formats == FORMATS


def test_a_pool_is_at_least_as_large_as_asked_for():
    assert sets(400, 150_000_000) == 3
    assert sets(1, 150_000_000) == 1


@pytest.mark.parametrize("kind", FORMATS)
def test_a_collapse_keeps_half_of_whole_pages(kind):
    hot, cold = segment(SHAPE, kind)
    assert hot * kind.page == 2 * cold * cold_tokens(SHAPE, kind)
    assert 128 <= hot * kind.page <= 512


def test_cases_too_large_for_the_memory_are_left_out_and_named():
    args = parsed("--only", "decode")
    (run, *_) = todo = command.runs(args)
    assert command.count(run) == 3 * 3 * 3 - 1
    (line,) = (x for x in command.notes(args, todo) if x.startswith("Left out"))
    assert "32/8/128, 16 × 32,768 tokens" in line


def test_runs_are_by_threads_and_memory_pages():
    found = [(r["threads"], r["huge"], r["parts"]) for r in command.runs(parsed())]
    alone, together = ["decode", "prefill", "collapse"], ["decode", "prefill"]
    assert found == [(1, True, alone), (1, False, alone), (2, True, together), (2, False, together)]


def test_a_collapse_gets_a_run_on_one_thread():
    runs = command.runs(parsed("--threads", "2", "--huge-pages", "off"))
    assert [(r["threads"], r["parts"]) for r in runs] == [
        (2, ["decode", "prefill"]),
        (1, ["collapse"]),
    ]


def test_given_arguments_count_over_quick():
    args = parsed("--quick", "--tokens", "2048")
    assert (args.tokens, args.threads) == ([2048], [1])


def test_calls_run_by_turns_and_the_first_round_is_not_timed():
    seen = []
    calls = {name: lambda i, name=name: seen.append((name, i)) for name in "ab"}
    times = timing.interleaved(calls, seconds=0, rounds=2)
    assert seen == [(name, i) for i in range(3) for name in "ab"]
    assert [len(x) for x in times.values()] == [2, 2]


def test_a_summary_has_the_median_and_the_quartiles():
    assert timing.summary([3.0]) == {"median": 3.0, "quartiles": [3.0, 3.0], "count": 1}
    assert timing.summary([4.0, 1.0, 2.0, 3.0, 5.0])["quartiles"] == [2.0, 4.0]


SMAPS = """\
1000-3000 rw-p 00000000 00:00 0
Rss:                   8 kB
AnonHugePages:         4 kB
VmFlags: rd wr mr mw me ac hg
3000-4000 rw-p 00000000 00:00 0
Rss:                   4 kB
AnonHugePages:         0 kB
"""


@pytest.mark.parametrize(
    ("start", "end", "share"),
    [(0x1800, 0x2000, 0.5), (0x3000, 0x4000, 0), (0x1000, 0x4000, 1 / 3), (0x4000, 0x5000, 0)],
)
def test_the_share_in_huge_pages_is_that_of_the_range(start, end, share):
    assert pools.share_of_range(SMAPS.splitlines(), start, end) == pytest.approx(share)


def test_memory_without_huge_pages_has_none():
    tensor = pools.memory(8 << 20, huge=False)
    tensor.fill_(1)
    assert pools.huge_share(tensor) == 0


def test_a_pool_has_cold_pages_and_hot_ones_where_the_table_says():
    shape, kind = Shape(2, 2, 64), Format(4, 32)
    table = pools.tables(3, 2, 5)
    assert sorted(table.flatten().tolist()) == list(range(30))
    cache = pools.pool(shape, kind, table, cold=4, huge=True)
    keys, values = formats.read_cold(cache, table[..., :4].flatten().long(), 4)
    hot = cache[table[..., 4:].flatten().long()]
    for numbers in (keys, values, hot.float()):
        assert abs(numbers.mean().item()) < 0.05
        assert numbers.std().item() == pytest.approx(1, abs=0.05)
    assert cache.dtype == torch.bfloat16


def kernel(median):
    return {"median": median, "bytes": 10**6, "huge": 1.0}


def decode(vllm_small, vllm_large, *ours):
    kernels = {"vllm-32": kernel(vllm_small), "vllm-128": kernel(vllm_large)}
    kernels |= {bits: kernel(t) for bits, t in zip(("16", "8", "4"), ours, strict=False)}
    return {"part": "decode", "shape": "9/3/64", "sequences": 1, "tokens": 4096, "kernels": kernels}


def test_ratios_are_to_the_better_page_size():
    case = decode(4e-3, 2e-3, 1e-3, 4e-3, 0.5e-3)
    assert rows.best_page(case) == "vllm-128"
    assert rows.ratios(case) == {"16": 2, "8": 0.5, "4": 4}


def test_means_are_geometric_and_over_what_was_measured():
    cases = [decode(1e-3, 2e-3, 1e-3), decode(1e-3, 2e-3, 0.25e-3, 0.5e-3)]
    assert rows.means(cases) == pytest.approx({"16": 2, "8": 2})


def test_a_row_of_decode():
    row = rows.decode_row(decode(1e-3, 2e-3, 0.5e-3, 1e-3, 2e-3))
    assert row[:5] == ["9/3/64", "1 × 4,096", "1", "1.0", "32"]
    assert row[5:] == ["0.5", "2.0", "2.00", "1", "1.0", "1.00", "2", "0.5", "0.50"]


def test_a_row_of_collapse_is_by_token():
    case = {"shape": "9/3/64", "bits": 4, "segment": 224, "tokens": 1000, "queries": 2000}
    case["kernels"] = {"collapse": kernel(1e-3), "16": kernel(40e-3)}
    assert rows.collapse_row(case)[1:] == ["16 → 4", "224", "1.000", "20.000", "5.0"]


def test_the_processor_is_named_with_the_flags_that_matter():
    text = "processor : 0\nmodel name : Some CPU\nflags : fpu avx2 avx512f sse\n"
    assert machine.processor(text) == {"cpu": "Some CPU", "flags": ["avx2", "avx512f"]}


def test_without_native_kernels_it_stops_with_a_sentence(monkeypatch, tmp_path):
    monkeypatch.setattr(native, "load", lambda: False)
    with pytest.raises(RunError, match="without its native kernels"):
        command.main(["--quick", "--out", str(tmp_path)])


@pytest.mark.slow
def test_a_quick_run_measures_every_part(tmp_path, capsys):
    if not native.load():
        pytest.skip("built without the native kernels")
    assert command.main(["--quick", "--out", str(tmp_path)]) == 0
    (run,) = json.loads((tmp_path / "kernels.json").read_text())["runs"]
    assert run["machine"]["torch threads"] == 1
    assert [case["part"] for case in run["cases"]] == [
        "decode",
        *["prefill"] * 2,
        *["collapse"] * 3,
    ]
    assert all(found["median"] > 0 for c in run["cases"] for found in c["kernels"].values())
    assert (tmp_path / "table.md").read_text().strip() in capsys.readouterr().out
