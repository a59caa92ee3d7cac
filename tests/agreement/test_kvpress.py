# SPDX-License-Identifier: Apache-2.0
"""Our scores rank tokens as those of kvpress do, given the same keys, values and queries.

kvpress wants another transformers than vLLM, see docs/evaluation-agreement.md.
"""

from types import SimpleNamespace

import pytest
import torch

kvpress = pytest.importorskip(
    "kvpress", reason="kvpress needs an environment of its own, see docs/evaluation-agreement.md"
)

from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb  # noqa: E402

from entropykv_vllm.kernels import reference  # noqa: E402
from entropykv_vllm.kernels.reduce import length, rows  # noqa: E402
from entropykv_vllm.kernels.scores import OBSERVED, SCORES  # noqa: E402
from entropykv_vllm.kernels.select import select  # noqa: E402

TOKENS, HEADS, GROUP, SIZE, PAGE = 160, 2, 2, 16, 32
WINDOW = OBSERVED["snapkv"].queries


def run_model():
    """What each layer of a small random Llama computes on one text."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=TOKENS,
        hidden_size=GROUP * HEADS * SIZE,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=GROUP * HEADS,
        num_key_value_heads=HEADS,
        initializer_range=0.3,  # attention that prefers some tokens
        attn_implementation="eager",
    )
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    calls = []
    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(
            lambda module, _, kwargs, output: calls.append((module, kwargs, output[1])),
            with_kwargs=True,
        )
    # No token twice: their scores would be equal, and rounding would choose.
    cache = model(torch.randperm(TOKENS)[None], use_cache=True).past_key_values
    return [seen(*call, kv) for call, kv in zip(calls, cache.layers, strict=True)]


def seen(module, kwargs, attentions, kv):
    """One layer's keys, values and queries, and the arguments of a press's methods."""
    hidden = kwargs["hidden_states"]
    queries = module.q_proj(hidden).view(1, TOKENS, GROUP * HEADS, SIZE).transpose(1, 2)
    queries, _ = apply_rotary_pos_emb(queries, queries, *kwargs["position_embeddings"])
    arguments = (module, hidden, kv.keys, kv.values, attentions, kwargs)
    return SimpleNamespace(keys=kv.keys, values=kv.values, queries=queries, arguments=arguments)


LAYERS = run_model()
every_layer = pytest.mark.parametrize("layer", LAYERS, ids=["first", "second"])


def theirs(press, layer, attentions=True):
    """The press's scores ``[heads, tokens]``."""
    arguments = list(layer.arguments)
    if not attentions:
        arguments[4] = None
    return press.score(*arguments)[0]


def free(name, layer):
    """Our attention-free scores ``[heads, tokens]``."""
    return SCORES[name](layer.keys, layer.values)[0]


def mass(layer, queries):
    """Attention ``[heads, tokens]`` of the last ``queries`` (None: of all), by the op on pages."""
    pages = TOKENS // PAGE
    cache = torch.zeros(pages, HEADS, PAGE, 2 * SIZE)
    by_token = [x[0].transpose(0, 1) for x in (layer.queries, layer.keys, layer.values)]
    reference.write(*by_token[1:], cache, torch.arange(TOKENS))
    table, noise = torch.arange(pages)[None].int(), torch.rand(pages, HEADS, PAGE)
    reference.observe(
        query=by_token[0],
        cache=cache,
        mass=noise,
        starts=torch.tensor([0, TOKENS]),
        table=table,
        cold=torch.tensor([0]),
        hot=torch.tensor([TOKENS]),
        bits=16,
        scale=SIZE**-0.5,
        softcap=0.0,
        sinks=None,
        first=torch.tensor([0 if queries is None else TOKENS - queries]),
        fresh=torch.tensor([1]),
    )
    return noise.transpose(0, 1).flatten(1)


def observed(name, layer, old=TOKENS):
    """Our score of the first ``old`` tokens from the attention that they got."""
    policy = OBSERVED[name]
    return policy.score(mass(layer, policy.queries)[:, :old])


def same_order(ours, reference_scores):
    """Whether both rank the tokens of each head alike, but for what rounding makes of equals."""
    along = reference_scores.gather(-1, ours.argsort(-1, descending=True))
    rise = (along - along.cummin(-1).values).max()
    return bool(rise <= 1e-5 * (along.max() - along.min()))


def neighbours(tokens):
    """How many of the five neighbours each token has."""
    count = torch.full((tokens,), 5.0)
    count[[0, -1]], count[[1, -2]] = 3.0, 4.0
    return count


@every_layer
def test_key_norm(layer):
    torch.testing.assert_close(free("knorm", layer), theirs(kvpress.KnormPress(), layer))
    assert same_order(free("knorm", layer), theirs(kvpress.KnormPress(), layer))


@every_layer
def test_keydiff(layer):
    """Both measure against the mean of the *unit* keys."""
    torch.testing.assert_close(free("keydiff", layer), theirs(kvpress.KeyDiffPress(), layer))
    assert same_order(free("keydiff", layer), theirs(kvpress.KeyDiffPress(), layer))


@every_layer
def test_h2o(layer):
    """kvpress divides a token's mass by the number of queries that see it; nothing else differs."""
    expected = theirs(kvpress.ObservedAttentionPress(), layer)
    ours = observed("h2o", layer)
    assert not same_order(ours, expected)
    mean = ours / torch.arange(TOKENS, 0, -1)
    torch.testing.assert_close(mean, expected)
    assert same_order(mean, expected)


@every_layer
@pytest.mark.parametrize("attentions", [True, False], ids=["given", "computed"])
def test_snapkv(layer, attentions):
    """kvpress means over queries and counts absent neighbours as zeros; nothing else differs."""
    press = kvpress.SnapKVPress(window_size=WINDOW)
    old = TOKENS - WINDOW  # the window itself always stays, here and there
    expected = theirs(press, layer, attentions)[:, :old]
    ours = observed("snapkv", layer, old)
    assert same_order(ours[:, 2:-2], expected[:, 2:-2])
    padded = ours * neighbours(old) / 5
    torch.testing.assert_close(padded / WINDOW, expected)
    assert same_order(padded, expected)


@every_layer
@pytest.mark.parametrize("attentions", [True, False], ids=["given", "computed"])
def test_tova(layer, attentions):
    """The last token always stays in kvpress; the plan's window does that here."""
    expected = theirs(kvpress.TOVAPress(), layer, attentions)[:, :-1]
    ours = observed("tova", layer)[:, :-1]
    torch.testing.assert_close(ours, expected)
    assert same_order(ours, expected)


@every_layer
@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
def test_streaming_llm(layer, share):
    """Sinks and the newest tokens stay: there by the score, here by sinks and window of a plan."""
    stay = theirs(kvpress.StreamingLLMPress(compression_ratio=1 - share), layer)
    window = int(TOKENS * share) - 4
    best = select(free("sink", layer)[:, :-window], 4, protect=4)
    ours = torch.zeros(HEADS, TOKENS).scatter(-1, best, 1)
    ours[:, -window:] = 1
    assert torch.equal(ours, stay)


@every_layer
@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
@pytest.mark.parametrize(
    ("name", "press"), [("knorm", kvpress.KnormPress), ("keydiff", kvpress.KeyDiffPress)]
)
def test_the_same_tokens_survive(layer, name, press, share):
    expected = press(compression_ratio=1 - share).compress(*layer.arguments)
    best = select(free(name, layer), int(TOKENS * share))[..., None]
    for whole, kept in zip((layer.keys, layer.values), expected, strict=True):
        ours = whole[0].take_along_dim(best, -2)
        # kvpress leaves them in the order of their scores.
        assert torch.equal(*(x[..., 0].sort(-1).values for x in (ours, kept[0])))


def raw_anchor(layer):
    """KeyDiff against the mean of the keys as they are."""
    return -torch.cosine_similarity(layer.keys, layer.keys.mean(-2, keepdim=True), dim=-1)[0]


def of_one_query_head(layer):
    """SnapKV's mass without the mean over the query heads of a group."""
    attention = layer.arguments[4][0, ::GROUP, -WINDOW:, :]
    return OBSERVED["snapkv"].score(attention.sum(-2))


WRONG = {
    "plus the key norm": (kvpress.KnormPress, lambda layer: length(rows(layer.keys))[0]),
    "value norm": (kvpress.KnormPress, lambda layer: -length(rows(layer.values))[0]),
    "plus the cosine": (kvpress.KeyDiffPress, lambda layer: -free("keydiff", layer)),
    "mean of raw keys": (kvpress.KeyDiffPress, raw_anchor),
    "least attended": (kvpress.TOVAPress, lambda layer: -observed("tova", layer)),
    "each head alone": (kvpress.TOVAPress, lambda layer: mass(layer, 1)),
    "two queries": (kvpress.TOVAPress, lambda layer: OBSERVED["tova"].score(mass(layer, 2))),
    "not pooled": (kvpress.SnapKVPress, lambda layer: mass(layer, WINDOW)),
    "all queries": (kvpress.SnapKVPress, lambda layer: OBSERVED["snapkv"].score(mass(layer, None))),
    "one query head": (kvpress.SnapKVPress, of_one_query_head),
    "mass not divided": (kvpress.ObservedAttentionPress, lambda layer: observed("h2o", layer)),
    "divided from the other end": (
        kvpress.ObservedAttentionPress,
        lambda layer: observed("h2o", layer) / torch.arange(1, TOKENS + 1),
    ),
}


@every_layer
@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_score_does_not_pass(layer, mistake):
    press, score = WRONG[mistake]
    press = press(window_size=WINDOW) if press is kvpress.SnapKVPress else press()
    inner = slice(2, TOKENS - WINDOW - 2)  # where the right score needs no correction
    assert not same_order(score(layer)[:, inner], theirs(press, layer)[:, inner])
