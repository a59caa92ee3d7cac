# SPDX-License-Identifier: Apache-2.0
"""`entropykv plan` about a model: what it prints, what it says of mistakes, what it imports."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys

import pytest

from entropykv_vllm import cli
from entropykv_vllm.config.presets import PRESETS
from entropykv_vllm.config.settings import preset_names
from entropykv_vllm.plan.model_config import known_models

QWEN = ("--model", "Qwen/Qwen2.5-7B-Instruct")
SMALL_CARD = (*QWEN, "--weights", "int4", "--context", "32k", "--gpu", "8GB")
NUMBERS = (
    *("--layers", "28", "--heads", "28", "--kv-heads", "4", "--head-size", "128"),
    *("--hidden-size", "3584", "--intermediate-size", "18944", "--vocab-size", "152064"),
)


@pytest.fixture(autouse=True)
def _nothing_cached(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.fixture
def plan(capsys):
    """Runs the command; the text or the JSON that it prints."""

    def run(*words: str):
        assert cli.main(["plan", *words]) == 0
        out = capsys.readouterr().out
        return json.loads(out) if "--json" in words else out

    return run


@pytest.fixture
def refuse(capsys):
    """Runs the command, which must refuse; the one sentence that it says."""

    def run(*words: str) -> str:
        assert cli.main(["plan", *words]) == 2
        streams = capsys.readouterr()
        assert streams.out == ""
        assert streams.err.startswith("entropykv plan: error: ")
        assert streams.err.count("\n") == 1
        return streams.err

    return run


def fits(report: dict, card: int = 0) -> dict:
    return {fit["cache"]: fit for fit in report["cards"][card]["fits"]}


def test_a_small_card_is_answered_with_a_preset_and_a_command(plan):
    text = plan(*SMALL_CARD, "--preset", "balanced")
    assert "7.62 billion parameters, 5.57 GB (int4); 28 layers of 4 KV heads of 128." in text
    assert "balanced: 1 request of 32,768 tokens at a time." in text
    assert "--kv-eviction entropykv --kv-eviction-config balanced --max-model-len 32768" in text
    assert "Weights in int4 need a model that was quantized so" in text


def test_all_numbers_of_a_card_follow_from_its_bytes(plan):
    report = plan(*SMALL_CARD, "--json")
    (card,) = report["cards"]
    used = report["weight_bytes"] + report["overhead_bytes"]
    assert card["room_bytes"] == 0.9 * 8e9 - used
    for cache in report["caches"]:
        fit = fits(report)[cache["cache"]]
        assert fit["pages"] == card["room_bytes"] // cache["page_bytes"] - 1
        assert fit["requests"] == fit["pages"] // cache["peak_pages"]
        assert (fit["longest"] >= report["tokens"]) == (fit["requests"] > 0)
        assert cache["held_bytes"] <= cache["peak_bytes"]
    assert [cache["cache"] for cache in report["caches"]][1:] == list(PRESETS)
    assert sorted(PRESETS) == preset_names()


def test_all_cards_are_shown_beside_each_other(plan):
    report = plan(*QWEN, "--json")
    assert [card["card_bytes"] for card in report["cards"]] == [8e9, 12e9, 16e9, 24e9, 80e9]
    assert [fits(report, i)["full, 16 bits"]["requests"] > 0 for i in range(5)] == [
        *[False] * 3,
        *[True] * 2,
    ]
    assert "command" not in report
    text = plan(*QWEN, "--gpu", "all")
    assert text == plan(*QWEN)
    (line,) = [line for line in text.splitlines() if line.startswith("for pages")]
    assert line.split() == ["for", "pages", "–", "–", "–", "5.58", "GB", "56", "GB"]
    assert "On the cards with a dash, the weights do not fit: --weights int4 takes 5.57 GB." in text


def test_weights_that_are_small_already_are_not_advised(plan):
    notes = plan("--model", "Qwen2.5-32B-Instruct", "--weights", "int4", "--json")["notes"]
    assert notes[0] == "On the cards with a dash, the weights do not fit."


def test_the_numbers_alone_do_as_well_as_the_model(plan):
    given = plan(*NUMBERS, "--positions", "32768", "--gpu", "24", "--json")
    named = plan(*QWEN, "--gpu", "24", "--json")
    bias = 28 * (28 + 2 * 4) * 128  # which a Llama has not
    assert named["parameters"] - given["parameters"] == bias
    assert given["caches"] == named["caches"]
    without = [number for number in NUMBERS if number not in ("--heads", "28")]
    assert (
        plan("--layers", "28", *without[1:], "--gpu", "24", "--json")["caches"] == given["caches"]
    )
    tied = plan(*NUMBERS, "--tied", "--gpu", "24", "--json")
    assert given["parameters"] - tied["parameters"] == 152064 * 3584


def test_without_a_known_limit_lengths_end_somewhere(plan):
    text = plan(*NUMBERS, "--gpu", "80", "--context", "64k")
    assert "1,048,576 or more" in text


def test_settings_of_ones_own_are_a_row_and_go_into_the_command(plan):
    words = ("--policy", "norm", "--config.keep", "0.3", "--page", "64")
    report = plan(*SMALL_CARD, *words, "--json")
    assert report["caches"][-1]["cache"] == "your settings"
    command = shlex.split(report["command"])
    assert command[:3] == ["vllm", "serve", "Qwen/Qwen2.5-7B-Instruct"]
    assert command[command.index("--kv-eviction") + 1] == "norm"
    assert json.loads(command[command.index("--kv-eviction-config") + 1]) == {"keep": 0.3}
    assert command[command.index("--block-size") + 1] == "64"


def test_policies_that_read_attention_are_said_to_be_for_cpus(plan):
    assert "h2o reads attention: it runs on CPUs only" in plan(*SMALL_CARD, "--policy", "h2o")
    assert "reads attention" not in plan(*SMALL_CARD, "--policy", "norm")


def test_the_command_is_one_that_the_servers_flags_take(plan):
    """And its settings are those that were planned with."""
    from entropykv_vllm.config.settings import load

    report = plan(*SMALL_CARD, "--preset", "max", "--config.keep", "0.3", "--json")
    command = shlex.split(report["command"])
    given = command[command.index("--kv-eviction-config") + 1]
    assert load("entropykv", given) == load("entropykv", {"preset": "max", "keep": 0.3})


@pytest.mark.parametrize(
    ("words", "verdict", "preset"),
    [
        (["--preset", "quality"], "does not fit; with balanced it does.", "balanced"),
        (["--overhead", "1.55GB"], "max, the mildest preset that fits: 1 request", "max"),
        (["--overhead", "1.62GB"], "does not fit with any preset: shorten --context.", None),
        (
            ["--overhead", "1.62GB", "--preset", "max"],
            "does not fit; nor with any other: shorten --context.",
            None,
        ),
    ],
)
def test_the_verdict_names_what_fits(plan, words, verdict, preset):
    report = plan(*SMALL_CARD, *words, "--json")
    assert verdict in report["verdict"]
    if preset is None:
        assert "command" not in report
    else:
        assert f"--kv-eviction-config {preset} " in report["command"]


def test_flags_of_the_server_change_what_fits(plan):
    rooms = [
        plan(*SMALL_CARD, *words, "--json")["cards"][0]["room_bytes"]
        for words in (
            ["--max-num-batched-tokens", "4096"],
            ["--max-num-seqs", "64"],
            [],
            ["--max-num-batched-tokens", "1024"],
            ["--gpu-memory-utilization", "0.95"],
        )
    ]
    assert rooms == sorted(rooms)
    assert len(set(rooms)) == len(rooms)


def test_memory_for_pages_can_be_given_in_place_of_a_card(plan):
    report = plan(*QWEN, "--kv-cache-memory-bytes", "1GiB", "--json")
    assert report["cards"][0]["room_bytes"] == 1 << 30
    as_vllm_has_it = plan(*QWEN, "--kv-cache-memory-bytes", "1073741824", "--json")
    assert as_vllm_has_it["cards"] == report["cards"]
    assert "--kv-cache-memory-bytes 1073741824" in report["command"]
    assert "--gpu-memory-utilization" not in report["command"]


def test_weights_that_are_not_quantized_are_of_the_servers_dtype(plan):
    sizes = [
        plan(*QWEN, "--dtype", dtype, "--json")["weight_bytes"]
        for dtype in ("bfloat16", "float16", "float32")
    ]
    assert [size / sizes[0] for size in sizes] == [1, 1, 2]
    assert plan(*SMALL_CARD, "--dtype", "float32", "--json")["weights"] == "int4"


def test_layers_with_a_sliding_window_are_named(plan):
    text = plan("--model", "gemma-3-4b-it", "--gpu", "24", "--context", "128k")
    assert "34 layers of 4 KV heads of 256, 29 of them with a sliding window." in text
    assert "a smaller --max-num-batched-tokens makes room" in text
    assert "The vision part of the model is not counted" in text


def test_a_preset_that_does_not_suit_the_pages_is_left_out(plan):
    report = plan(*QWEN, "--page", "16", "--json")
    assert "quality" not in [cache["cache"] for cache in report["caches"]]
    assert any(note.startswith("quality is left out: ") for note in report["notes"])


def test_the_tiers_of_a_model_are_those_of_its_full_layers(plan):
    report = plan("--model", "gemma-3-4b-it", "--tiers", "--preset", "max", "--json")
    assert report["tiers"][0]["layers"] == 5
    assert report["tokens"] == 8192


def test_a_model_that_reads_less_than_usual_is_asked_for_that(plan):
    assert plan("--model", "TinyLlama-1.1B-Chat-v1.0", "--json")["tokens"] == 2048


def test_an_unknown_type_says_how_it_was_counted(plan, tmp_path):
    config = {
        "model_type": "new",
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "vocab_size": 1000,
        "max_position_embeddings": 4096,
        "quantization_config": {"quant_method": "awq", "bits": 4},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    report = plan("--model", str(tmp_path), "--json")
    assert report["weights"] == "int4"
    assert report["notes"][0].startswith("The parameters of a 'new' are counted as a Llama's")
    assert not any("need a model that was quantized" in note for note in report["notes"])
    sized = plan("--model", str(tmp_path), "--weights", "5.6GB", "--json")
    assert (sized["weights"], sized["weight_bytes"]) == ("as given", 5.6e9)


def test_weights_of_an_unknown_kind_are_asked_for_and_then_planned_with(plan, refuse, tmp_path):
    config = known_models()[QWEN[1]] | {"quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = ("--model", str(tmp_path))
    assert "(mxfp4) is not known: say it with --weights" in refuse(*model)
    assert plan(*model, "--weights", "5.6GB", "--json")["weight_bytes"] == 5.6e9
    assert plan(*model, "--weights", "int8", "--json")["weights"] == "int8"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([*QWEN, "--context", "64k"], "reads at most 32,768 tokens, and --context asks for 65,536"),
        ([*QWEN, "--gpu", "8GB"], "a card of 8 GB: take a larger card, --weights int4 (5.57 GB)"),
        ([*SMALL_CARD, "--max-num-seqs", "256"], "take a larger card or fewer --max-num-seqs or"),
        ([*QWEN, "--gpu", "4"], "a card of 4 GB: take a larger card or a smaller model"),
        (["--model", "no/such"], "'no/such' is not on this disk"),
        (["--gpu", "8GB"], "--gpu needs a model: name one with --model, or give its numbers"),
        (["--tiers"], "--tiers needs a model"),
        (["--tied"], "--tied needs a model"),
        (["--layers", "0"], "no model has 0 layers: give their number with --layers"),
        (["--layers", "1000000"], "no model has 1,000,000 layers"),
        (["--head-size", "0"], "heads of 0 channels are not supported: they must be a multiple"),
        (["--head-size", "-64"], "heads of -64 channels are not supported"),
        ([*QWEN, "--head-size", "100"], "heads of 100 channels are not supported"),
        ([*QWEN, "--head-size", "512", "--tiers"], "a multiple of 16, up to 256"),
        (["--model", ""], "there is no '': give a model's folder"),
        ([*QWEN, "--positions", "-5"], "is -5: give a number above 0 with --positions"),
        (["--hidden-size", "512"], "KV heads are not known: give them with --kv-heads"),
        (["--kv-heads", "4"], "num_hidden_layers is not known: give it with --layers"),
        ([*NUMBERS, "--kv-heads", "0"], "num_key_value_heads is 0: give a number above 0"),
        ([*NUMBERS, "--kv-heads", "3"], "28 query heads cannot share 3 KV heads"),
        ([*QWEN, "--layers", "0"], "num_hidden_layers is 0: give a number above 0 with --layers"),
        ([*QWEN, "--weights", "int3"], "'int3' is no way to store weights: choose bfloat16"),
        ([*QWEN, "--weights", "4"], "'4' is no way to store weights: choose bfloat16"),
        ([*QWEN, "--context", "1000M"], "'1000M' is too long: lengths are planned up to"),
        ([*QWEN, "--gpu", "huge"], "'huge' is not an amount of memory such as 8GB"),
        ([*QWEN, "--context", "many"], "'many' is not a number of tokens such as 8192"),
        ([*QWEN, "--answer", "9000"], "--answer asks for 9,000 tokens of a request of 8,192"),
        ([*QWEN, "--preset", "max", "--config", "max"], "--preset and --config both name settings"),
        ([*QWEN, "--config", "streaming"], "made for --kv-eviction sink, not entropykv"),
        ([*QWEN, "--gpu-memory-utilization", "1.5"], "is 1.5, not above 0 and at most 1"),
        ([*QWEN, "--gpu-memory-utilization", "0"], "is 0.0, not above 0 and at most 1"),
        ([*QWEN, "--max-num-seqs", "0"], "--max-num-seqs is 0: it must be 1 or more"),
        ([*QWEN, "--max-num-batched-tokens", "16"], "(16) than --max-num-seqs (32): give both"),
        ([*QWEN, "--page", "20"], "--page is 20: it must be a multiple of 16"),
        (
            [*QWEN, "--page", "16", "--preset", "quality"],
            "saves nothing: set a larger --block-size",
        ),
        (
            [*QWEN, "--gpu", "8", "--kv-cache-memory-bytes", "1GB"],
            "--gpu and --kv-cache-memory-bytes exclude each other",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(refuse, words, sentence):
    assert sentence in refuse(*words)


def test_a_model_without_full_attention_is_refused(refuse, tmp_path):
    config = {
        "model_type": "mistral",
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "vocab_size": 1000,
        "sliding_window": 4096,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "no full-attention layer" in refuse("--model", str(tmp_path))


@pytest.mark.parametrize("words", [SMALL_CARD, ()])
def test_planning_is_quick_because_neither_torch_nor_vllm_is_imported(words):
    code = (
        "import sys\n"
        "from entropykv_vllm.cli import main\n"
        f"status = main(['plan', *{words!r}])\n"
        "heavy = {'torch', 'vllm', 'numpy', 'transformers'} & set(sys.modules)\n"
        "raise SystemExit(str(heavy) if heavy else status)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
