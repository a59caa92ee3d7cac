# SPDX-License-Identifier: Apache-2.0
"""The simulator: exact where nothing is lost, and losing just what the plan says."""

import pytest
import torch

from entropykv_vllm.evaluation.offline import answers, divergence
from entropykv_vllm.evaluation.offline.cell import Cell, layout
from entropykv_vllm.evaluation.offline.reading import Reading
from entropykv_vllm.evaluation.offline.session import Session
from entropykv_vllm.evaluation.tasks import Case
from entropykv_vllm.plan.schedule import held_tokens

FULL = Cell("full", "none")
SHORT = {"window": 32, "interval": 64, "segment": 64}


def half(policy, **more):
    return Cell(policy, policy, {"keep": 0.5, "bits": 16, **SHORT, **more})


def session(model, ids, cells, more=64, dtype=torch.float32):
    layouts = [layout(cell, model, dtype) for cell in cells]
    return Session(model, Reading(model, ids), layouts, dtype, more)


def stock(model, ids):
    """What transformers computes with its own attention."""
    from transformers import AutoModelForCausalLM

    net = AutoModelForCausalLM.from_pretrained(
        model.folder, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.inference_mode():
        return net(torch.tensor([ids])).logits[0]


def test_a_full_cache_gives_the_logits_of_transformers(model, prompt):
    ids = prompt(200)
    run = session(model, ids[:150], [FULL, FULL])
    rows = model.logits(run.read(torch.tensor([ids[150:]] * 2)))
    expected = stock(model, ids)[150:]
    torch.testing.assert_close(rows[0], expected, atol=2e-4, rtol=2e-4)
    assert torch.equal(rows[0], rows[1])


def test_all_kept_in_16_bits_is_the_full_cache(model, prompt):
    ids = prompt(300)
    cells = [FULL, Cell("all", "entropykv", {"keep": 1.0, "bits": 16, **SHORT})]
    rows = session(model, ids[:260], cells).read(torch.tensor([ids[260:]] * 2))
    assert torch.equal(rows[0], rows[1])


@pytest.mark.parametrize("policy", ["entropykv", "norm", "h2o", "snapkv", "tova", "random"])
def test_cells_do_not_depend_on_who_is_beside_them(model, prompt, policy):
    ids = prompt(330)
    more = torch.tensor([ids[280:]])
    alone = session(model, ids[:280], [half(policy)]).read(more)
    beside = session(model, ids[:280], [FULL, half("keydiff"), half(policy)])
    together = beside.read(more.repeat(3, 1))
    torch.testing.assert_close(together[2:], alone, atol=1e-5, rtol=1e-5)
    assert (together[0] - together[2]).abs().max() > 1e-3


@pytest.mark.parametrize("policy", ["norm", "entropykv"])
def test_scores_that_the_kernels_do_not_know_are_made_in_torch(model, prompt, policy, monkeypatch):
    ids = prompt(330)
    more = torch.tensor([ids[280:]])
    known = session(model, ids[:280], [half(policy)]).read(more)
    monkeypatch.setattr("entropykv_vllm.kernels.native.SCORES", ())
    made = session(model, ids[:280], [half(policy)]).read(more)
    torch.testing.assert_close(made, known, atol=1e-4, rtol=1e-4)


def test_what_a_cell_sees_does_not_depend_on_the_steps(model, prompt):
    ids = prompt(400)
    more = torch.tensor([ids[270:]])
    once = session(model, ids[:270], [half("entropykv")], 130).read(more)
    run = session(model, ids[:270], [half("entropykv")], 130)
    parts = torch.cat([run.read(part) for part in more.split(7, 1)], 1)
    torch.testing.assert_close(once, parts, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("policy", ["entropykv", "h2o", "sink"])
@pytest.mark.parametrize("bits", [16, 4])
def test_survivors_are_as_many_as_planned_and_each_is_there_once(model, prompt, policy, bits):
    settings = SHORT if bits == 16 else {"window": 32, "interval": 128}
    cell = Cell(policy, policy, {"keep": 0.5, "bits": bits, **settings})
    ids = prompt(600)
    run = session(model, ids, [cell])
    run.read(torch.tensor([[5]]))
    plan = run.pages.layouts[0].plans[0]
    at = 600 // plan.interval * plan.interval
    table, cold, hot = run.pages._table(0, 600, 1)
    for head in range(model.heads):
        places = [
            run.pages.positions[page, head, : plan.cold if i < cold[0] else plan.page]
            for i, page in enumerate(table[0].tolist())
        ]
        seen = torch.cat(places)[: int(cold[0]) * plan.cold + int(hot[0])].tolist()
        assert len(seen) == held_tokens(plan, at, 601)
        assert len(set(seen)) == len(seen)
        assert set(range(4)) <= set(seen)  # sinks
        assert set(range(601 - 32, 601)) <= set(seen)


def test_positions_travel_with_their_keys(model, prompt):
    from entropykv_vllm.kernels.layout import read_pages

    ids = prompt(300)
    run = session(model, ids, [half("entropykv")])
    run.read(torch.tensor([[5]]))
    layer = model.full[-1]
    table, cold, _ = run.pages._table(len(model.full) - 1, 300, 1)
    pages = table[0, : int(cold[0])].long()
    keys, _ = read_pages(run.pages.cache, pages)
    where = run.pages.positions[pages][..., : run.pages.page].long()
    for head in range(model.heads):
        expected = run.reading.rows[layer][0][where[:, head], head]
        assert torch.equal(keys[:, head], expected)


def test_masses_are_those_of_a_dense_softmax(model, prompt):
    reading = Reading(model, prompt(150))
    layer = len(model.full) - 1
    call = reading._calls[model.full[layer]]
    keys = call.key[0].repeat_interleave(call.query.shape[2] // model.heads, 1)
    logits = torch.einsum("qhd,khd->hqk", call.query[0], keys)[:, :130, :130] * call.scale
    hidden = torch.ones(130, 130).triu(1).bool()
    weights = logits.masked_fill(hidden, -torch.inf).softmax(-1)
    for queries in (None, 32, 1):
        mine = reading.mass(queries, 130)[layer]
        summed = weights[:, -(queries or 130) :].sum(1).view(model.heads, -1, 130).mean(1)
        torch.testing.assert_close(mine, summed, atol=1e-4, rtol=1e-4)
    assert torch.equal(reading.mass(32, 999), reading.mass(32, 150))


def test_what_attention_favours_survives_under_h2o(model, prompt):
    ids = prompt(300)
    run = session(model, ids, [half("h2o")])
    run.read(torch.tensor([[5]]))
    table, cold, _ = run.pages._table(0, 300, 1)
    pages = table[0, : int(cold[0])].long()
    plan = run.pages.layouts[0].plans[0]
    first = run.pages.positions[pages, 0, : plan.page].flatten().long()
    mass = run.reading.mass(None, 128)[0, 0, :64]
    kept = mass[[p for p in first.tolist() if p < 64]].mean()
    assert kept > mass.mean()


def case(ids):
    return Case(ids[:250], ids[250:256], ids[256:260], ("7",), 0.5)


@pytest.mark.parametrize("aware", [False, True])
def test_answers_of_the_full_cache_are_the_greedy_ones(model, prompt, aware):
    ids = prompt(260)
    (found,) = answers.answer(model, [FULL], [case(ids)], 5, aware, dtype="float32")
    expected = list(ids)
    for _ in range(5):
        expected.append(int(stock(model, expected)[-1].argmax()))
    stops = [i for i, token in enumerate(expected[260:]) if token in model.stops()]
    assert found.answers == [" ".join(map(str, expected[260:][: stops[0] if stops else 5]))]
    assert found.held == pytest.approx(2 * 288 / 260)  # whole pages of 32 bits a number


def test_an_aware_cell_is_compressed_once_after_the_question(model, prompt):
    cell = Cell("snapkv", "snapkv", {"keep": 0.25, "bits": 16, "window": 32, "segment": 64})
    assert layout(cell, model, torch.float32, 256).plans[0].interval == 256


def test_divergence_is_zero_for_the_full_cache_and_grows(model, prompt):
    texts = [prompt(320) for _ in range(2)]
    cells = [FULL, half("entropykv"), half("entropykv", keep=0.1)]
    full, some, few = divergence.measure(model, cells, texts, 280, dtype="float32")
    assert full["kl"][0] == pytest.approx(0, abs=1e-6)
    assert 0 < some["kl"][0] < few["kl"][0]
    assert full["perplexity"] > 1
    assert len(few["texts"][0]["kl"]) == 40
