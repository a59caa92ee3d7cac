# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernels, in the emulation of a GPU, against the ops in plain torch."""

import ctypes
import shutil
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from entropykv_vllm.config.settings import EvictionConfig
from entropykv_vllm.kernels import cuda, formats, native, reference
from entropykv_vllm.kernels.moves import Batch
from tests.kernels.paged import (
    DTYPES,
    GARBAGE,
    HEAD_SIZES,
    PAGES,
    Brief,
    examples,
    fill_cold,
    garbage,
    new_cache,
    seeds,
    slots_of,
    strided,
    used_bytes,
)
from tests.kernels.test_native import (
    balanced_scores,
    check_choice,
    check_others,
    draw_destinations,
    draw_tokens,
    same_bytes,
    worth_of_units,
)

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="needs a compiler")
SIZES = (16, *HEAD_SIZES)


@pytest.fixture(scope="module", autouse=True)
def library():
    """The emulated kernels in place of the GPU's."""
    from tests.kernels import emulated

    found = emulated.load()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "_OPS", torch.ops.entropykv_emulated)
        yield found


# -- write ----------------------------------------------------------------------------------------


@examples(80)
@given(
    heads=st.integers(1, 4),
    head_size=st.sampled_from(SIZES),
    page=st.sampled_from(PAGES),
    dtype=st.sampled_from(DTYPES),
    new_dtype=st.sampled_from(DTYPES),
    tokens=st.integers(0, 70),
    wide=st.booleans(),
    seed=seeds,
)
def test_write(library, heads, head_size, page, dtype, new_dtype, tokens, wide, seed):
    """Slots in any order, some skipped; every other byte of the cache stays as it was."""
    torch.manual_seed(seed)
    cache = new_cache(9, heads, page, head_size, dtype, "noise", False)
    expected = cache.clone()
    slots = torch.randperm(9 * page)[:tokens]
    slots[torch.rand(len(slots)) < 0.2] = -1
    sides = torch.randn(2, len(slots), heads, head_size).to(new_dtype)
    keys, values = (strided(x, wide) for x in sides)
    reference.write(keys, values, expected, slots, order="rows")
    library.emulation_seed(ctypes.c_uint64(seed))
    cuda.write(keys, values, cache, slots)
    assert same_bytes(cache, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_write_rounds_as_torch_does(dtype):
    """Halves between two numbers, the smallest, the largest, and what has no number."""
    special = [0.0, -0.0, 1e-8, 6e-8, 6.1e-5, 65504.0, 65520.0, 1e30, torch.inf, -torch.inf]
    edges = torch.arange(0x3F80, 0x3F90, dtype=torch.int32) * 65536 + 32768
    numbers = torch.cat([torch.tensor(special), edges.view(torch.float32), -torch.randn(70)])
    keys = numbers[:96].view(1, 1, 96)
    cache = torch.zeros(1, 1, 16, 192, dtype=dtype)
    cuda.write(keys, torch.full_like(keys, torch.nan), cache, torch.tensor([3]))
    assert same_bytes(cache[0, 0, 3, :96], keys[0, 0].to(dtype))
    assert cache[0, 0, 3, 96:].isnan().all()


# -- collapse and drop ----------------------------------------------------------------------------


@dataclass(repr=False)
class Call(Brief):
    """A call for some layers; `worth`: given scores ``[layers, moves, heads, tokens]``."""

    caches: list
    src: torch.Tensor
    dst: torch.Tensor
    sinks: torch.Tensor
    policy: str
    granularity: str
    scope: str
    from_bits: int
    bits: int
    seed: int
    worth: torch.Tensor | None = None

    @property
    def apart(self):
        """Whether to write at once: as soon as it is allowed."""
        return not torch.isin(self.dst, self.src).any()

    @property
    def page_tokens(self):
        return formats.cold_capacity(self.caches[0], self.from_bits)

    @property
    def run(self):
        """Tokens that stay or go together."""
        keep = self.dst.shape[1] * formats.cold_capacity(self.caches[0], self.bits)
        return torch.gcd(torch.tensor(16), torch.tensor(keep)).item() if self.blocks else 1

    @property
    def blocks(self):
        return self.granularity == "block"

    def collapse(self, library, side=None, apart=None):
        caches, side = clones(self.caches), side and clones(side)
        apart = self.apart if apart is None else apart
        choice = self.policy, self.granularity, self.scope, self.from_bits, self.bits
        library.emulation_seed(ctypes.c_uint64(self.seed))
        moves = self.src, self.dst, self.sinks
        cuda.collapse(caches, *moves, *choice, self.worth, side, apart=apart)
        return caches, side

    def drop(self, library, side=None, apart=None):
        caches, side = clones(self.caches), side and clones(side)
        apart = self.apart if apart is None else apart
        library.emulation_seed(ctypes.c_uint64(self.seed))
        moves = self.src, self.dst, self.sinks
        cuda.drop(caches, *moves, self.policy, self.bits, self.worth, side, apart=apart)
        return caches, side

    def expected(self, op, *choice, side=None):
        """The reference, layer by layer and move by move."""
        caches, side = clones(self.caches), side and clones(side)
        for layer, cache in enumerate(caches):
            table, worth = side and side[layer], self.worth
            moves = self.src, self.dst, self.sinks, self.policy
            given = None if worth is None else worth[layer]
            op(cache, *moves, *choice, self.bits, given, table, order="rows")
        return caches, side

    def new_side(self, positions=False):
        """Of each layer a number for each slot: anything, or where the token is in its segment."""
        blocks, heads = self.caches[0].shape[:2]
        slots = max(self.page_tokens, formats.cold_capacity(self.caches[0], self.bits)) + 2
        if not positions:
            return list(garbage((len(self.caches), blocks, heads, slots), torch.float32, "noise"))
        table = torch.full((blocks, heads, slots), torch.nan)
        for pages in self.src:
            places = torch.arange(pages.numel() * self.page_tokens).view(len(pages), 1, -1)
            table[pages, :, : self.page_tokens] = places.float()
        return [table.clone() for _ in self.caches]


def clones(tensors):
    """Copies with the same strides and unused bytes."""
    storages = {}
    made = []
    for x in tensors:
        key = x.untyped_storage().data_ptr()
        storages.setdefault(key, x.untyped_storage().clone())
        made.append(
            torch.empty(0, dtype=x.dtype).set_(
                storages[key], x.storage_offset(), x.shape, x.stride()
            )
        )
    return made


def new_caches(layers, pages, *shape, shared):
    """Layers' caches, of their own or slices of one tensor."""
    if not shared:
        return [new_cache(pages, *shape, shared=False) for _ in range(layers)]
    heads, page, head_size, dtype, kind = shape
    whole = garbage((pages, layers, heads, page, 2 * head_size), dtype, kind)
    return list(whole.unbind(1))


@st.composite
def calls(draw, whole_pages=False):
    layers, heads = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    head_size, page = draw(st.sampled_from(SIZES)), draw(st.sampled_from(PAGES))
    dtype, bits = draw(st.sampled_from(DTYPES)), draw(st.sampled_from([16, 8, 4]))
    if whole_pages:
        bits = draw(st.sampled_from([8, 4]))
    n, m = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    from_bits = bits if whole_pages or draw(st.booleans()) else 16
    few, seed = draw(st.booleans()), draw(seeds)
    torch.manual_seed(seed)
    probe = torch.empty(1, heads, page, 2 * head_size, dtype=dtype)
    source, target = (formats.cold_capacity(probe, b) for b in (from_bits, bits))
    s = -(-m * target // source) + draw(st.integers(0, 3))
    src = torch.randperm(n * s).view(n, s) + 2
    shape = heads, page, head_size, dtype, draw(st.sampled_from(GARBAGE))
    caches = new_caches(layers, n * s + 2 + n * m, *shape, shared=draw(st.booleans()))
    # Numbers that nothing can be computed with, where nothing but copies is made of them.
    huge = draw(st.sampled_from([1.0, 1.0, 1e-4, 300.0]))
    for cache in caches:
        keys, values = draw_tokens((n * s * source, heads, head_size), torch.float32, few)
        fill(cache, src, from_bits, keys * huge, values * huge)
    return Call(
        caches=caches,
        src=src,
        dst=draw_destinations(draw, src, m),
        sinks=torch.tensor(draw(st.lists(st.integers(0, m * target + 3), min_size=n, max_size=n))),
        policy=draw(st.sampled_from(native.SCORES)),
        granularity=draw(st.sampled_from(["token", "block"])),
        scope=draw(st.sampled_from(["head", "layer"])),
        from_bits=from_bits,
        bits=bits,
        seed=seed,
    )


def fill(cache, src, bits, keys, values):
    """Write tokens ``[tokens, heads, head_size]`` to all pages, in their order."""
    if bits == 16:
        slots = slots_of(src.flatten(), cache.shape[2], len(keys))
        reference.write(keys, values, cache, slots, order="rows")
        return
    by_page = (x.unflatten(0, (src.numel(), -1)).transpose(1, 2) for x in (keys, values))
    fill_cold(cache, src.flatten(), *by_page, bits, order="rows")


def tokens_of(call, cache, move):
    """Keys and values ``[heads, tokens, head_size]`` of what a move reads."""
    sides = formats.read_cold(cache, call.src[move], call.from_bits, "rows")
    return [x.transpose(0, 1).flatten(1, 2) for x in sides]


def check_bytes(call, caches, expected):
    """Equal bytes of the pages that are written, up to those that mean nothing, and of all else."""
    for ours, theirs, before in zip(caches, expected, call.caches, strict=True):
        used = used_bytes(ours, call.bits)
        written = [formats.page_bytes(x)[call.dst.flatten(), :, :used] for x in (ours, theirs)]
        assert torch.equal(*written)
        check_others(ours, before, call.dst)


@examples(80)
@given(calls())
def test_collapse_by_given_scores(library, call):
    """Equal choices, bytes and numbers, also in place, with ties, infinities and NaN."""
    heads, tokens = call.caches[0].shape[1], call.src.shape[1] * call.page_tokens
    worth = balanced_scores(len(call.caches), len(call.src), heads, tokens)
    if call.scope == "head" and not call.blocks:
        worth = torch.where(torch.rand(worth.shape) < 0.5, worth, torch.randn(worth.shape))
        worth = torch.where(torch.rand(worth.shape) < 0.1, -0.0, worth)
        worth = torch.where(torch.rand(worth.shape) < 0.1, 0.0, worth)
    call, side = replace(call, policy="any", worth=worth), call.new_side()
    choice = call.granularity, call.scope, call.from_bits
    expected, numbers = call.expected(reference.collapse, *choice, side=side)
    caches, moved = call.collapse(library, side)
    check_bytes(call, caches, expected)
    assert same_bytes(torch.stack(moved), torch.stack(numbers))


def check_move(call, kept, layer, move):
    """That the tokens ``kept`` ``[heads, units]`` by computed scores are the best, in order."""
    keys, values = tokens_of(call, call.caches[layer], move)
    assert (kept.diff() > 0).all()
    protect = -(-int(call.sinks[move]) // call.run)
    worth, slack = worth_of_units(call, keys, values, call.run)
    for of_head, units in zip(worth.expand(len(keys), -1), kept, strict=True):
        check_choice(units, of_head, protect, slack)


@examples(80)
@given(calls())
def test_collapse(library, call):
    """What stays, as positions in a side table tell, is the best; and the bytes are its own."""
    caches, side = call.collapse(library, call.new_side(positions=True))
    heads, tokens = call.caches[0].shape[1], call.src.shape[1] * call.page_tokens
    capacity = formats.cold_capacity(call.caches[0], call.bits)
    chosen = torch.zeros(len(caches), len(call.src), heads, tokens)
    for layer, table in enumerate(side):
        for move, pages in enumerate(call.dst):
            places = table[pages, :, :capacity].transpose(0, 1).flatten(1).long()
            chosen[layer, move].scatter_(1, places, 1.0)
            units = places.unflatten(1, (-1, call.run))
            assert torch.equal(units, units[..., :1] + torch.arange(call.run))
            check_move(call, units[..., 0] // call.run, layer, move)
    by_choice = replace(call, policy="any", worth=chosen, sinks=call.sinks * 0)
    expected, _ = by_choice.expected(reference.collapse, "token", "head", call.from_bits)
    check_bytes(call, caches, expected)


@examples(25)
@given(calls(), seeds)
def test_the_order_of_threads_and_blocks_changes_no_bit(library, call, seed):
    """Nor does writing at once, where that is allowed."""
    first, _ = call.collapse(library, apart=False)
    second, _ = replace(call, seed=seed).collapse(library)
    for one, other in zip(first, second, strict=True):
        assert same_bytes(one, other)


@examples(25)
@given(calls())
def test_a_hash_of_the_key_is_that_of_the_reference(library, call):
    """It is made of integers, so what stays is equal, and so is all that is made of it."""
    call = replace(call, policy="random", scope="head", granularity="token")
    expected, _ = call.expected(reference.collapse, "token", "head", call.from_bits)
    check_bytes(call, call.collapse(library)[0], expected)


@examples(80)
@given(calls(whole_pages=True))
def test_drop_by_given_scores(library, call):
    """Scores whose sums are exact, and some pages with one that is no number."""
    shape = len(call.caches), len(call.src), call.caches[0].shape[1], call.src.shape[1]
    worth = torch.randint(-1, 2, (*shape, call.page_tokens)).float()
    worth[..., -1].masked_fill_(torch.rand(shape) < 0.2, torch.nan)
    call, side = replace(call, policy="any", worth=worth.flatten(3)), call.new_side()
    expected, numbers = call.expected(reference.drop, side=side)
    caches, moved = call.drop(library, side)
    check_bytes(call, caches, expected)
    for cache, theirs in zip(caches, expected, strict=True):
        assert same_bytes(cache, theirs)
    assert same_bytes(torch.stack(moved), torch.stack(numbers))


@examples(80)
@given(calls(whole_pages=True))
def test_drop(library, call):
    """Each head's pages are copies of its best ones, in their order."""
    call = replace(call, scope="head")
    tokens = call.page_tokens
    caches, side = call.drop(library, call.new_side(positions=True))
    for layer, table in enumerate(side):
        old, new = (formats.page_bytes(x[layer]) for x in (call.caches, caches))
        for move, pages in enumerate(call.dst):
            places = table[pages, :, :tokens].transpose(0, 1).long()
            kept = places[..., 0] // tokens
            assert torch.equal(places, (kept * tokens)[..., None] + torch.arange(tokens))
            for head, of_head in enumerate(kept):
                assert torch.equal(new[pages, head], old[call.src[move][of_head], head])
            keys, values = tokens_of(call, call.caches[layer], move)
            worth, slack = worth_of_units(call, keys, values, tokens)
            for of_head, units in zip(worth, kept, strict=True):
                check_choice(units, of_head, -(-int(call.sinks[move]) // tokens), slack)
        check_others(caches[layer], call.caches[layer], call.dst)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_that_codes_cannot_hold(bits, dtype, library):
    """NaN, infinities, what fp16 cannot hold, constant channels, and steps next to halves."""
    torch.manual_seed(1)
    cache = new_cache(40, 2, 32, 64, dtype, "nan", False)
    src, dst = torch.arange(8)[None], torch.tensor([[20]])
    keys, values = torch.randn(2, 256, 2, 64)
    for x in (keys, values):
        x[::7, :, 3] = torch.nan
        x[::5, :, 9] = torch.inf
        x[::11, :, 11] = -torch.inf
        x[:, :, 20] = 3.25
        x[:, :, 21] = 0.0
        x[:, :, 22] *= 1e-7
        x[:, :, 23] = torch.arange(256)[:, None] * 0.5
        x[:, :, 24] *= 1e5
    fill(cache, src, 16, keys, values)
    pages = -(-formats.cold_capacity(cache, bits) // 32)
    choice = torch.tensor([0]), "sink", "token", "head", 16, bits
    call = Call([cache], src[:, :pages], dst, *choice, seed=1)
    expected, _ = call.expected(reference.collapse, "token", "head", 16)
    check_bytes(call, call.collapse(library)[0], expected)


def test_a_call_without_moves_writes_nothing(library):
    cache = torch.zeros(3, 2, 16, 32)
    none = torch.zeros(0, 2, dtype=torch.int64)
    cuda.collapse([cache], none, none[:, :1], none[:, 0], "norm", "token", "head", 16, 16)
    cuda.drop([cache], none, none[:, :1], none[:, 0], "norm", 8)
    assert not cache.any()


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize(
    ("kind", "bits"), [("collapse", 4), ("collapse", 16), ("merge", 8), ("drop", 4), ("drop", 16)]
)
def test_moves_are_carried_out_by_these_kernels(kind, bits, apart, monkeypatch):
    """As a worker has them; 16-bit pages that are dropped compete token by token."""
    moves = pytest.importorskip("entropykv_vllm.kernels.gpu.moves")
    ops = moves._ops
    monkeypatch.setattr(cuda, "load", lambda: True)
    monkeypatch.setattr(moves, "_ops", lambda on_gpu, apart: ops(True, apart))
    assert moves.description() == "CUDA and Triton"
    torch.manual_seed(5)
    caches = new_caches(2, 20, 2, 32, 64, torch.bfloat16, "noise", shared=True)
    from_bits = 16 if kind == "collapse" else bits
    src = torch.randperm(18).view(2, 9)[:, : 9 if from_bits == 16 else 4].contiguous()
    for cache in caches:
        tokens = src.numel() * formats.cold_capacity(cache, from_bits)
        fill(cache, src, from_bits, *torch.randn(2, tokens, 2, 64))
    dst, sinks = (
        torch.tensor([[18], [19]]) if apart else src[:, :1].contiguous(),
        torch.tensor([3, 0]),
    )
    settings = EvictionConfig(policy="random")
    expected = clones(caches)
    for cache in expected:
        if kind == "drop" and bits < 16:
            reference.drop(cache, src, dst, sinks, "random", bits, order="rows")
        else:
            choice = "random", *settings.selection, from_bits, bits
            reference.collapse(cache, src, dst, sinks, *choice, order="rows")
    moves.carry_out(caches, Batch(kind, bits, src, dst, sinks), settings, apart)
    for ours, theirs in zip(caches, expected, strict=True):
        used = used_bytes(ours, bits)
        written = [formats.page_bytes(x)[dst.flatten(), :, :used] for x in (ours, theirs)]
        assert torch.equal(*written)


def test_which_kernels_carry_out_moves(monkeypatch):
    moves = pytest.importorskip("entropykv_vllm.kernels.gpu.moves")
    for built in (True, False):
        monkeypatch.setattr(cuda, "load", lambda built=built: built)
        on_gpu, on_cpu = moves._ops(True, True), moves._ops(False, True)
        assert on_cpu == {"collapse": moves.triton.collapse, "drop": moves.triton.drop}
        assert (on_gpu == on_cpu) is not built
        assert moves.description().startswith("CUDA" if built else "Triton")


PAGE = torch.zeros(3, 2, 16, 32)
ODD = torch.zeros(3 * 2 * 16 * 32 + 1)[1:].view(3, 2, 16, 32)
REFUSED = [
    ({"caches": []}, "no layers"),
    ({"caches": [PAGE, PAGE[:2]]}, "one shape"),
    ({"caches": [PAGE.double()]}, "float32, bfloat16 or float16"),
    ({"caches": [PAGE[..., :-8]]}, "each page contiguous"),
    ({"caches": [torch.zeros(3, 2, 16, 16)]}, "multiples of 16"),
    ({"caches": [torch.zeros(3, 2, 16, 33)]}, "multiples of 16"),
    ({"caches": [ODD]}, "16 bytes"),
    ({"src": torch.tensor([[1]], dtype=torch.int32)}, "src must be contiguous, int64"),
    ({"dst": torch.tensor([[1, 2]])}, "a move makes pages fewer"),
    ({"sinks": torch.tensor([0, 0])}, "one row per move"),
    ({"policy": "best"}, "unknown policy best"),
    ({"granularity": "page"}, "granularity is token or block"),
    ({"scope": "model"}, "scope is head or layer"),
    ({"bits": 5}, "16, 8 or 4 bits"),
    ({"from_bits": 4}, "cannot become"),
    ({"bits": 4}, "do not fill"),
    ({"scores": torch.zeros(1, 1, 2, 15)}, "scores are float32"),
    ({"scores": torch.zeros(1, 1, 16, 2).mT}, "scores are float32"),
    ({"side": [torch.zeros(3, 2, 15)]}, "side is float32"),
    ({"side": [torch.zeros(3, 2, 16)] * 2}, "side is float32"),
]


@pytest.mark.parametrize(("wrong", "message"), REFUSED)
def test_what_does_not_fit_is_refused(wrong, message):
    arguments = {
        "caches": [PAGE],
        "src": torch.tensor([[1]]),
        "dst": torch.tensor([[2]]),
        "sinks": torch.tensor([0]),
        "policy": "norm",
        "granularity": "token",
        "scope": "head",
        "from_bits": 16,
        "bits": 16,
    }
    with pytest.raises(RuntimeError, match=message):
        cuda.collapse(**arguments | wrong)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"key": torch.zeros(65)[1:].view(2, 2, 16)}, "16 bytes"),
        ({"value": torch.zeros(2, 2, 16).half()}, "keys and values are"),
        ({"key": torch.zeros(1, 2, 16)}, "more slots than tokens"),
        ({"slots": torch.tensor([0, 1], dtype=torch.int32)}, "slots must be"),
    ],
)
def test_what_cannot_be_written_is_refused(wrong, message):
    key = torch.zeros(2, 2, 16)
    cache, slots = torch.zeros(3, 2, 16, 32), torch.tensor([0, 1])
    with pytest.raises(RuntimeError, match=message):
        cuda.write(**{"key": key, "value": key, "cache": cache, "slots": slots} | wrong)


def test_the_bytes_that_must_move_are_counted():
    """A segment of seven pages, 112 of its tokens kept in one page of 4 bits."""
    caches = [torch.zeros(9, 8, 32, 256, dtype=torch.bfloat16)] * 3
    src, dst = torch.zeros(2, 7), torch.zeros(2, 1)
    hot, cold = 7 * 8 * 32 * 512, 8 * (112 * 128 + 2 * 2 * 2 * 128 + 4 * 112)
    assert formats.cold_capacity(caches[0], 4) == 112
    assert cuda.collapse_bytes(caches, src, dst, 16, 4) == 3 * 2 * (hot + cold)
