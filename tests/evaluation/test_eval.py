# SPDX-License-Identifier: Apache-2.0
"""The evaluation of one's own model and text, with a simulator and a server that are made up."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest

from entropykv_vllm.config.settings import load
from entropykv_vllm.errors import RunError, UsageError
from entropykv_vllm.evaluation import corpus
from entropykv_vllm.evaluation.eval import (
    advice,
    command,
    engine,
    grid,
    jobs,
    offline,
    plot,
    rows,
    run,
    score,
    texts,
    windows,
)
from entropykv_vllm.evaluation.offline import answers as simulator
from entropykv_vllm.evaluation.offline import divergence as comparison
from entropykv_vllm.evaluation.tasks import TASKS, Case
from tests.evaluation.letters import Letters

CONFIG = {
    "max_position_embeddings": 4096,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "hidden_size": 512,
}


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A model's folder, with a tokenizer of letters and not much prose."""
    import transformers

    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    tokenizers = SimpleNamespace(from_pretrained=lambda _: Letters())
    monkeypatch.setattr(transformers, "AutoTokenizer", tokenizers)
    prose = corpus.text()[:20_000]
    monkeypatch.setattr(corpus, "text", lambda: prose)
    return str(folder)


@pytest.fixture
def calls(monkeypatch):
    """What the simulator was asked; it knows all answers with a full cache, none with another."""
    seen = []

    def answers(model, cells, cases, answer_tokens, aware):
        seen.append(("answer", [cell.name for cell in cells], len(cases), aware))
        for case in cases:
            right = " " + ", ".join(case.answers)
            yield [
                (right if cell.policy == "none" else "no", cell.eviction.get("keep", 1.0))
                for cell in cells
            ]

    def distances(model, cells, texts, prompt_tokens):
        seen.append(("measure", [cell.name for cell in cells], len(texts), len(texts[0])))
        for number in range(len(texts)):
            step = {"kl": [0.01 * (number % 3)], "top1": [1.0], "nll": [math.log(12.5)]}
            yield [step for _ in cells]

    monkeypatch.setattr(simulator, "each", answers)
    monkeypatch.setattr(comparison, "each", distances)
    monkeypatch.setattr(offline, "_model", lambda name: name)
    return seen


def words(model, out, *more):
    return [
        *("--model", model, "--out", str(out), "--tokens", "1024", "--prompts", "4"),
        *(
            "--tasks",
            "needle,copy",
            "--policies",
            "norm,sink",
            "--keeps",
            "1,0.5",
            "--bits",
            "16,8",
        ),
        *more,
    ]


CELLS = ["full", "norm-1-8", "norm-0.5-16", "norm-0.5-8", "sink-0.5-16"]


def test_all_settings_are_answered_together_and_only_once(model, calls, tmp_path, capsys):
    out = tmp_path / "out"
    assert command.main(words(model, out)) == 0
    assert calls == [("answer", CELLS, 4, False)] * 2
    assert command.main(words(model, out)) == 0
    assert len(calls) == 2
    assert command.main(words(model, out, "--seed", "1")) == 0
    assert len(calls) == 4
    assert "| needle |   1024 | full cache |    1 |   16 |    100 |" in capsys.readouterr().out


def test_a_setting_that_is_new_is_the_only_one_to_run(model, calls, tmp_path):
    command.main(words(model, tmp_path))
    command.main([*words(model, tmp_path), "--keeps", "1,0.5,0.25", "--presets", "max"])
    assert calls[-1][1] == ["norm-0.25-16", "norm-0.25-8", "sink-0.25-16", "max"]


def test_an_interrupted_run_goes_on_after_the_last_prompt(model, calls, tmp_path, monkeypatch):
    whole = simulator.each

    def torn(*arguments):
        rows = whole(*arguments)
        yield from (next(rows), next(rows), next(rows))
        raise KeyboardInterrupt

    monkeypatch.setattr(simulator, "each", torn)
    with pytest.raises(KeyboardInterrupt):
        command.main(words(model, tmp_path))
    assert len(list((tmp_path / "cells").glob("needle-1024-part-*.jsonl"))) == 1
    monkeypatch.setattr(simulator, "each", whole)
    assert command.main(words(model, tmp_path)) == 0
    assert [call[2] for call in calls] == [4, 1, 4]
    assert not list((tmp_path / "cells").glob("*-part-*"))
    (cell,) = (tmp_path / "cells").glob("needle-1024-full-*.json")
    assert json.loads(cell.read_text())["accuracy"][0] == 1


def test_what_is_held_is_the_mean_over_the_prompts(model, calls, tmp_path, monkeypatch):
    def each(net, cells, cases, *more):
        return ([("", number / 10) for _ in cells] for number in range(len(cases)))

    monkeypatch.setattr(simulator, "each", each)
    command.main(words(model, tmp_path))
    (cell,) = (tmp_path / "cells").glob("needle-1024-full-*.json")
    assert json.loads(cell.read_text())["held"] == pytest.approx(0.15)


@pytest.mark.parametrize(("question", "counted"), [("before", True), ("after", False)])
def test_tokens_count_the_question_if_it_is_read_before(model, question, counted):
    for case in texts.cases(Letters(), engine_spec(model, question=question)):
        assert len(case.context) + len(case.question) * counted == 1024


def test_answers_of_a_server_before_it_failed_are_kept(model, tmp_path, monkeypatch):
    asked = []

    class Endpoint:
        def __init__(self, url, tokenizer, model):
            pass

        def answers(self, prompts, most):
            asked.append(len(prompts))
            yield from ["1", "2"]
            if len(asked) == 1:
                raise RunError("out of luck")
            yield "3"

    monkeypatch.setattr("entropykv_vllm.evaluation.eval.endpoint.Endpoint", Endpoint)
    (setting,) = [jobs.job(tmp_path, engine_spec(model))]
    from entropykv_vllm.evaluation.eval import endpoint

    with pytest.raises(RunError):
        endpoint.answers(Letters(), [setting], lambda *_: None)
    endpoint.answers(Letters(), [setting], lambda *_: None)
    assert asked == [4, 2]
    assert [one["answer"] for one in setting.result()["answers"]] == ["1", "2", "1", "2"]


def test_the_table_its_numbers_and_the_cells_are_written(model, calls, tmp_path):
    command.main(words(model, tmp_path, "--kl", "--question", "before"))
    assert calls[0] == ("answer", CELLS, 4, True)
    assert calls[-1] == ("measure", CELLS, texts.TEXTS, 1024 + texts.STEPS)
    table = (tmp_path / "table.md").read_text()
    assert table.count("\n") == 2 + 2 * len(CELLS)
    assert "12.50" in table
    found = json.loads((tmp_path / "table.json").read_text())
    assert len(found) == 3 * len(CELLS)
    assert found[0]["accuracy"][0] == 1
    assert found[1]["accuracy"][0] == 0
    cells = list((tmp_path / "cells").glob("needle-1024-full-*.json"))
    assert len(json.loads(cells[0].read_text())["answers"]) == 4


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (("--tasks", "chess"), "'chess' is not a task: choose of needle"),
        (("--bits", "5"), "bits is 5"),
        (("--tokens", "4090"), "4090 tokens are too many: this model reads 4096"),
        (("--tokens", "1000", "--question", "before"), "a multiple of 64"),
        (("--policies", "sink", "--bits", "6"), "bits is 6: there are 16, 8 and 4"),
        (("--config", '{"window": 32}'), "norm-1-8 has a layer with a window of 64 tokens"),
        (
            (
                "--config",
                '{"tiers": [{"name": "a", "layers": [0]}, '
                '{"name": "b", "layers": [1], "window": 0}]}',
            ),
            "norm-1-8 has a layer with a window of 64 tokens",
        ),
        (("--out", "/proc/nowhere"), "--out /proc/nowhere cannot be written"),
        (("--model", "/nowhere"), "'/nowhere' is not a folder of a language model"),
        (("--backend", "cloud"), "'cloud' is no backend"),
        (("--backend", "http://127.0.0.1:9/v1"), "--policies is for the offline"),
        (("--tokens", "48"), "needle in 48 tokens: what is to be hidden needs"),
        (("--tasks", ""), "nothing is asked for"),
        (("--presets", "best"), "'best' is not a preset"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_a_sentence(
    model, calls, tmp_path, more, sentence, monkeypatch
):
    monkeypatch.setattr("entropykv_vllm.evaluation.engines.model_folder", lambda name: name)
    with pytest.raises(UsageError) as refused:
        command.main(words(model, tmp_path, *more))
    assert sentence in str(refused.value)
    assert calls == []


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (("--kl",), "--kl needs the offline"),
        (("--question", "before"), "--question before needs"),
        (("--keeps", "0.5"), "--keeps is for the offline and the engine backend"),
        (("--presets", "max"), "an endpoint is one row"),
        (("--config", '{"keep": 0.5}'), "--config is for the offline"),
    ],
)
def test_what_a_server_cannot_be_asked_is_refused_in_a_sentence(tmp_path, more, sentence):
    with pytest.raises(UsageError) as refused:
        command.main(["--backend", "http://127.0.0.1:9/v1", "--out", str(tmp_path), *more])
    assert sentence in str(refused.value)


def test_a_tokenizer_that_is_none_is_refused_in_a_sentence(tmp_path):
    where = ["--backend", "http://127.0.0.1:9/v1", "--tokenizer", str(tmp_path / "nosuch")]
    with pytest.raises(UsageError, match="nosuch' is not a folder with a tokenizer") as refused:
        command.main([*where, "--out", str(tmp_path)])
    assert "\n" not in str(refused.value)


def test_a_model_that_says_it_in_other_words_is_not_said_to_be_none(model, tmp_path):
    (Path(model) / "config.json").write_text('{"model_type": "gpt2", "n_positions": 1024}')
    with pytest.raises(UsageError, match=r"config\.json of .* has no max_position_embeddings"):
        command.main(words(model, tmp_path))


@pytest.mark.parametrize("config", ['{"window": "abc"}', '{"window": null}', "null", "[1]", "{"])
def test_settings_that_are_none_are_refused(config, capsys):
    with pytest.raises(SystemExit):
        command.parser().parse_args(["--config", config])
    assert "argument --config: " in capsys.readouterr().err


def test_one_depth_is_possible():
    assert command.parser().parse_args(["--depths", "0.5,0.5"]).depths == [0.5, 0.5]


def test_curves_of_windows_and_tiers_count_with_their_shortest(model):
    base = {"preset": "balanced", "bits": 16, "window": 256}
    lengths = [
        windows.least(load("entropykv", {**base, **more}), wide(model))
        for more in ({}, {"lara_window": 0.5})
    ]
    assert lengths[0] == 256 > lengths[1] > 0


def wide(model):
    """The model, with enough layers for a curve."""
    (Path(model) / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": 30}))
    return model


def test_a_server_that_does_not_answer_is_no_wrong_use(model, tmp_path, monkeypatch):
    monkeypatch.setattr("entropykv_vllm.evaluation.engines.model_folder", lambda name: model)
    with pytest.raises(RunError, match="9/v1/models does not answer"):
        command.main(["--backend", "http://127.0.0.1:9/v1", "--out", str(tmp_path)])


def test_a_text_of_ones_own_is_used_and_must_be_long_enough(model, calls, tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("A sentence of forty-two characters, this. " * 10)
    with pytest.raises(UsageError, match="the text has 420 tokens, and 1024 are needed"):
        command.main(words(model, tmp_path, "--text", str(path)))
    path.write_text("Long " * 400)
    assert command.main(words(model, tmp_path, "--text", str(path))) == 0
    (cell,) = (tmp_path / "cells").glob("needle-1024-full-*.json")
    spec = json.loads(cell.read_text())["spec"]
    context = Letters().decode(texts.cases(Letters(), spec)[0].context)
    assert context.count("Long ") > 150
    assert " The secret number" in context


def test_another_text_of_the_same_name_is_another_cell(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("one")
    first = texts.describe(path)
    path.write_text("two")
    assert texts.describe(path) != first
    assert texts.describe(None) is None


def test_the_server_answers_with_its_own_cache(model, tmp_path, monkeypatch):
    class Endpoint:
        def __init__(self, url, tokenizer, model):
            assert (url, model) == ("http://somewhere/v1", "their-model")

        def answers(self, prompts, most):
            return (Letters().decode(prompt)[-100:] for prompt in prompts)

    monkeypatch.setattr("entropykv_vllm.evaluation.eval.endpoint.Endpoint", Endpoint)
    where = ["--backend", "http://somewhere/v1", "--tokenizer", model]
    asked = ["--tokens", "1024", "--prompts", "4", "--tasks", "needle,copy", *where]
    assert command.main(["--model", "their-model", "--out", str(tmp_path), *asked]) == 0
    assert (tmp_path / "table.md").read_text().splitlines()[0].split() == [
        *("|", "task", "|", "tokens", "|", "policy", "|"),
        *("accuracy", "%", "(95", "%)", "|", "digits", "%", "(95", "%)", "|"),
        *("form", "%", "(95", "%)", "|"),
    ]


def test_what_keeps_everything_in_16_bits_is_the_full_cache_and_runs_once():
    found = grid.settings(["norm", "window"], [1.0, 0.5], [16, 4], "streaming", {}, 2048)
    names = ["full", "norm-1-4", "norm-0.5-16", "norm-0.5-4", "window-0.5-16", "streaming"]
    assert [setting.name for setting in found] == names
    assert found[4].eviction["window"] == 256 + (2048 - 256) // 2
    assert [setting.config().policy for setting in found[1:]] == [
        *("norm", "norm", "norm", "window", "sink")
    ]


def engine_spec(model, task="needle", policy="norm", question="after"):
    args = SimpleNamespace(
        **{"backend": "engine", "model": model, "tokenizer": model, "text": None},
        **{"prompts": 4, "seed": 0, "depths": [0.0, 1.0], "question": question},
    )
    eviction = {} if policy == "none" else {"keep": 0.5, "bits": 4}
    setting = grid.Setting("cell", policy, policy, 0.5, 4, eviction)
    return jobs.spec(args, task, 1024, setting)


def test_an_engine_that_is_to_see_the_question_collapses_right_after_it(model, tmp_path):
    before = engine.complete(engine_spec(model, question="before"), tmp_path)
    assert before["eviction"]["interval"] == 1024
    after = engine.complete(engine_spec(model), tmp_path)
    assert "interval" not in after["eviction"]
    assert after["engine"]["max_model_len"] - before["engine"]["max_model_len"] == engine.QUESTION


def test_the_yardstick_of_an_engine_is_stock_vllm_on_the_same_text(model, tmp_path):
    full, other = (
        engine.complete(engine_spec(model, jobs.DIVERGENCE, policy), tmp_path)
        for policy in ("none", "norm")
    )
    assert full["engine"]["kv_cache_dtype"] == "auto"
    assert other["engine"]["kv_cache_dtype"] == "bfloat16"
    assert full["yardstick"] == other["yardstick"]
    room = "kv_cache_memory_bytes"
    assert full["engine"][room] == 2 * other["engine"][room]


def test_a_full_cache_whose_distributions_are_gone_is_measured_again(model, tmp_path, monkeypatch):
    spec = engine.complete(engine_spec(model, jobs.DIVERGENCE, "none"), tmp_path)
    job = jobs.job(tmp_path, spec)
    job.finish({"kl": [0.0, 0.0, 0.0]})
    ran = []
    monkeypatch.setattr(
        engine.cells, "run", lambda module, spec, path, step: ran.append(path.exists())
    )
    engine.divergence(None, [job], lambda done, total: None)
    open(spec["yardstick"], "w").close()
    job.finish({"kl": [0.0, 0.0, 0.0]})
    engine.divergence(None, [job], lambda done, total: None)
    assert ran == [False, True]


def test_an_engine_that_fails_is_reported_and_left_out(model, tmp_path, monkeypatch, capsys):
    failing, other = (
        jobs.job(tmp_path, engine.complete(engine_spec(model, policy=policy), tmp_path))
        for policy in ("none", "norm")
    )

    def run(module, spec, path, step):
        if spec["policy"] == "none":
            raise RunError("the engine is out of luck")

    steps = []
    monkeypatch.setattr(engine.cells, "run", run)
    engine.answers(None, [failing, other], lambda *step: steps.append(step))
    assert "out of luck" in capsys.readouterr().err
    assert steps == [(4, 8), (8, 8)]


def case(*answers):
    return Case([], [], [], answers, 0.25)


def test_the_interval_is_wilsons_unless_an_answer_is_half_right():
    found = score.summary(TASKS["needle"], [case("7264391")] * 2, [" 7264391", " 7264390"])
    assert found["accuracy"] == [
        0.5,
        pytest.approx(0.0945, abs=1e-3),
        pytest.approx(0.9055, abs=1e-3),
    ]
    assert found["digits"][0] == pytest.approx((1 + 6 / 7) / 2)
    assert found["form"][0] == 1
    assert [answer["grade"] for answer in found["answers"]] == [1, 0]
    halves = score.estimate([0.5, 0.5, 1.0])
    assert halves[0] == pytest.approx(2 / 3)
    assert halves[1:] == [0.5, 1.0]


def test_several_numbers_have_their_digits_each_in_its_place():
    wanted = case("12345", "67890")
    assert score.digits(" 12345 and 67891", wanted) == pytest.approx((1 + 4 / 5) / 2)
    assert score.digits(" 12345.", wanted) == 0.5
    assert score.form(" 12345 and 6", wanted) == 0.5


def test_words_have_no_digits():
    found = score.summary(TASKS["word"], [case("lemon")], [" lemon"])
    assert set(found) == {"accuracy", "answers"}


def test_the_front_has_what_no_other_beats():
    points = [(50, 90), (20, 70), (30, 60), (40, 90), (100, 100), (20, 65)]
    assert plot.front(points) == [(20, 70), (40, 90), (100, 100)]
    assert plot.front([]) == []


def result(task, policy, held, accuracy, tokens=1024):
    spec = {"task": task, "tokens": tokens, "name": policy, "series": policy, "policy": policy}
    return {
        "spec": {**spec, "keep": 0.5, "bits": 16},
        "held": held,
        "accuracy": [accuracy, accuracy - 0.1, accuracy + 0.1],
    }


def test_the_picture_is_drawn_of_what_was_held(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "accuracy.png"
    results = [
        result(task, policy, held, 0.5)
        for task in ("needle", "word", "copy")
        for policy, held in (("none", 1.0), ("norm", 0.5), ("norm", 0.3))
    ]
    assert plot.draw(results, path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert not plot.draw([result("needle", "server", None, 0.5)], path)


def test_plain_text_has_rows_of_its_own_if_nothing_else_was_asked():
    text = {**result(jobs.DIVERGENCE, "norm", None, 0.0), "kl": [0.5, 0.4, 0.6]}
    del text["accuracy"]
    table = rows.render([{**text, "perplexity": 20.0}])
    assert table.splitlines()[-1].split() == [
        *("|", "kl", "|", "1024", "|", "norm", "|", "0.5", "|", "16", "|"),
        *("0.500", "(0.400-0.600)", "|", "20.00", "|"),
    ]


def test_the_command_is_known_and_all_tasks_can_be_asked_for(model):
    from entropykv_vllm import cli

    assert cli.ELSEWHERE["eval"][0] == "entropykv_vllm.evaluation.eval.command"
    args = command.parser().parse_args(["--tasks", "all", "--model", model])
    command.check.check(args)
    assert args.tasks == list(TASKS)
    assert len(run.groups(args)) == len(TASKS)


def test_settings_that_save_nothing_are_named():
    def row(name, policy, held, tokens=512):
        spec = {"name": name, "series": policy, "policy": policy, "tokens": tokens}
        return {"spec": {**spec, "keep": 0.5, "bits": 8}, "held": held}

    found = [row("full", "none", 1.03), row("a", "entropykv", 1.1), row("b", "sink", 0.6)]
    (said,) = advice.warnings([*found, *found])
    assert said.startswith(
        "at 512 tokens entropykv, keep 0.5, 8 bits hold as much as the full cache or more"
    )
    assert advice.warnings([found[0], found[2]]) == []
    assert advice.warnings([row("server", "server", None)]) == []
